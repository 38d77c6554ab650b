"""Runs that go from start to end undisturbed, by the number of ranks and a name; tests look at what they
left.

All runs of one number of ranks share one start of torchrun (`several.py`); 0 is the trainer without torchrun.
"""

from __future__ import annotations

WIDTH = ("--task-options", "width=8")

# 1,437 samples in batches of 64: the last batch of an epoch has 29, which two ranks cannot share evenly.
DIGITS = ("--task-options", "dropout=0", *WIDTH, "--max-steps", "30", "--clip-norm", "1")
HUNGRY = ("--task", "seeded_tasks:Hungry", "--max-steps", "12")
HALF_USED = ("--task", "seeded_tasks:HalfUsed", "--weight-decay", "0.5", "--max-steps", "3")

# 80 sequences in batches of 12: the last batch of an epoch has 8.
TINY = ("--task", "tiny_lm", "--global-batch", "12", "--max-steps", "12", "--clip-norm", "1", "--lr", "0.001")
TINY += tuple(
    part for option in ("d_model=64", "n_layers=2", "d_ff=128", "samples=80") for part in ("--task-options", option)
)
LOW = (*WIDTH, "--max-steps", "60", "--lr", "0.003", "--clip-norm", "1")
LINEAR = ("--task", "toy_linear", "--max-steps", "10")
NORMALISED = ("--task", "seeded_tasks:Normalised", "--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.05")
SEVEN = ("--task", "seeded_tasks:Seven")

RUNS: dict[int, dict[str, tuple[str, ...]]] = {
    0: {
        "digits": ("--strategy", "single", *DIGITS),
        "hungry": ("--strategy", "single", *WIDTH, "--task-options", "dropout=0", "--max-steps", "12"),
        "tiny": ("--strategy", "single", *TINY),
        "seven": ("--strategy", "single", *SEVEN, "--global-batch", "6", "--epochs", "4", "--lr", "0.01"),
    },
    2: {
        "ddp": DIGITS,
        # a share of 32 in micro-batches of at most 12 is 11, 11 and 10
        "accumulated": (*DIGITS, "--micro-batch", "12"),
        "manual-allreduce": (*DIGITS, "--strategy", "manual_allreduce", "--micro-batch", "16"),
        "manual-rs-ag": (*DIGITS, "--strategy", "manual_rs_ag", "--micro-batch", "16"),
        "unused-allreduce": (*HALF_USED, "--strategy", "manual_allreduce"),
        "unused-rs-ag": (*HALF_USED, "--strategy", "manual_rs_ag"),
        "seven": (*SEVEN, "--global-batch", "4", "--max-steps", "1", "--lr", "1e-9"),
        "learnt": (*WIDTH, "--epochs", "6", "--lr", "0.003"),
        "hungry-forward": (*HUNGRY, "--task-options", "where=forward"),
        "hungry-backward": (*HUNGRY, "--task-options", "where=backward"),
        "fsdp": ("--strategy", "fsdp", *TINY, "--micro-batch", "2"),
        "fsdp-normalised": ("--strategy", "fsdp", *NORMALISED, "--max-steps", "20"),
        "pipeline-1f1b": ("--strategy", "pipeline", "--pipeline-schedule", "1f1b", *TINY),
        "pipeline-gpipe": ("--strategy", "pipeline", "--pipeline-schedule", "gpipe", *TINY),
        "pipeline-digits": ("--strategy", "pipeline", *WIDTH, "--max-steps", "60", "--lr", "0.003"),
        "bf16": (*LOW, "--precision", "bf16"),
        "fp16": (*LOW, "--precision", "fp16"),
        "profiled": (*WIDTH, "--max-steps", "8", "--profile", "4:6"),
        "linear": LINEAR,
        "compiled": (*LINEAR, "--compile"),
        "compiled-accumulated": (*LINEAR, "--compile", "--micro-batch", "8", "--clip-norm", "1e9"),
        "compiled-fsdp": (*LINEAR, "--compile", "--strategy", "fsdp"),
        "compiled-manual": (*LINEAR, "--compile", "--strategy", "manual_rs_ag"),
        "static-graph": (*LINEAR, "--static-graph", "--micro-batch", "8"),
        "static-graph-reference": (*LINEAR, "--micro-batch", "8"),
        "unused-ddp": (*HALF_USED, "--find-unused-parameters"),
        "unused-ddp-reference": (*HALF_USED, "--strategy", "manual_allreduce"),
        "fsdp-bf16": ("--strategy", "fsdp", *TINY, "--precision", "bf16"),
        "pipeline-bf16": ("--strategy", "pipeline", *TINY, "--precision", "bf16"),
    },
    3: {
        # 7 samples in batches of 6: the last batch is one sample for three ranks
        "seven": (*SEVEN, "--global-batch", "6", "--epochs", "4", "--lr", "0.01"),
    },
}

DROPOUT = ("--task-options", "dropout=0.1")
RESUMED: dict[str, tuple[tuple[str, ...], int, int]] = {
    "fp16": (("--task", "seeded_tasks:Overflowing", "--precision", "fp16"), 10, 20),
    "normalised": (NORMALISED, 9, 20),
    # draws from torch, NumPy and Python in the loss and in the data set
    "noisy": (("--task", "seeded_tasks:Noisy"), 9, 20),
    "manual": (("--strategy", "manual_rs_ag", *WIDTH, "--micro-batch", "20"), 9, 25),
    "fsdp": (("--strategy", "fsdp", *TINY, *DROPOUT), 5, 12),
    "pipeline": (("--strategy", "pipeline", *TINY, *DROPOUT), 5, 12),
}
"""Two ranks that stop after some steps, start again and go on to the end: arguments, where they stop, and the
end.
"""

for name, (arguments, stop, end) in RESUMED.items():
    RUNS[2][f"{name}-broken"] = (*arguments, "--max-steps", str(stop))
    RUNS[2][f"{name}-unbroken"] = (*arguments, "--max-steps", str(end))
