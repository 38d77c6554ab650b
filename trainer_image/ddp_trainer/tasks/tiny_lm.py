"""A small causal transformer on bytes: 3.4 million parameters, next-token prediction.

The text is the source of the running Python's own standard library, which every image holds; every tenth file
is held out. `tokens=random` trains on seeded random tokens instead: nothing can be learnt there, so the loss
falls to ln(vocab_size) and no further, which makes a wrong gradient easy to see.
"""

from __future__ import annotations

import math
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.tasks import Task, check_counts, check_share

HELD_OUT_EVERY = 10
RANDOM_SEED = 1234


class TinyLM(Task):
    """Options: `tokens` (`stdlib` or `random`), `samples` to train on, the shape of the model, and `dropout`."""

    def __init__(
        self,
        tokens: str = "stdlib",
        samples: int = 8192,
        vocab_size: int = 512,
        d_model: int = 256,
        n_heads: int = 8,
        n_layers: int = 4,
        d_ff: int = 1024,
        seq_len: int = 64,
        dropout: float = 0.0,
    ) -> None:
        if tokens not in ("stdlib", "random"):
            raise UserError(f"task 'tiny_lm': tokens={tokens!r} is unknown; write tokens=stdlib or tokens=random")
        counts = {"samples": samples, "vocab_size": vocab_size, "d_model": d_model, "n_heads": n_heads}
        check_counts("tiny_lm", {**counts, "n_layers": n_layers, "d_ff": d_ff, "seq_len": seq_len})
        check_share("tiny_lm", "dropout", dropout)
        if d_model % 2 or seq_len < 2:
            raise UserError(
                f"task 'tiny_lm': d_model={d_model} must be even, for the sines and cosines of positions, and "
                f"seq_len={seq_len} at least 2, a token and the one that follows"
            )
        if d_model % n_heads:
            raise UserError(f"task 'tiny_lm': d_model={d_model} must be a multiple of n_heads={n_heads}")
        if tokens == "stdlib" and vocab_size < 256:
            raise UserError(f"task 'tiny_lm': vocab_size={vocab_size} is less than the 256 values of a byte")
        self.tokens = tokens
        self.samples = samples
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self._shape = (d_model, n_heads, n_layers, d_ff, dropout)

    def model(self) -> nn.Module:
        d_model, n_heads, n_layers, d_ff, dropout = self._shape
        return TinyTransformerLM(self.vocab_size, d_model, n_heads, n_layers, d_ff, self.seq_len, dropout)

    def train_dataset(self) -> Dataset[Any]:
        return Sequences(self._split[0])

    def eval_dataset(self) -> Dataset[Any]:
        return Sequences(self._split[1])

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        """Mean cross-entropy of token t+1 given tokens 0..t; `output` [B, T, V], `batch` [B, T]."""
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def stage(self, model: nn.Module, index: int, count: int) -> nn.Module:
        assert isinstance(model, TinyTransformerLM)
        if count > len(model.blocks):
            raise UserError(f"task 'tiny_lm': its {len(model.blocks)} layers cannot be cut into {count} stages")
        for place in range(len(model.blocks)):
            if place * count // len(model.blocks) != index:
                model.blocks[place] = nn.Identity()
        if index > 0:
            model.tok_emb = None
        if index < count - 1:
            model.ln_f = model.head = None
        return model

    def score(self, output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        right = output[:, :-1].argmax(dim=-1) == batch[:, 1:]
        return right.sum(), right.numel()

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """Training and held-out sequences, each [samples, seq_len] of int64."""
        held_out = max(1, self.samples // HELD_OUT_EVERY)
        if self.tokens == "random":
            generator = torch.Generator().manual_seed(RANDOM_SEED)
            shape = (self.samples + held_out, self.seq_len)
            drawn = torch.randint(0, self.vocab_size, shape, generator=generator)
            return drawn[: self.samples], drawn[self.samples :]
        train, held = _stdlib_bytes(self.samples * self.seq_len, held_out * self.seq_len)
        return self._cut(train), self._cut(held)

    def _cut(self, text: bytes) -> Tensor:
        whole = len(text) // self.seq_len * self.seq_len
        return torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, self.seq_len).long()


class Sequences(Dataset[Tensor]):
    """Token sequences [samples, seq_len]; one index gives a sample, a tensor of them a batch."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | Tensor) -> Tensor:
        return self.tokens[index]


class TinyTransformerLM(nn.Module):
    """Decoder-only transformer with pre-normalisation and fixed sinusoidal positions: tokens [B, T] to logits
    [B, T, V].

    As a stage of a pipeline it lacks the embedding, the head or both, and takes or gives activations [B, T,
    D].
    """

    pos_emb: Tensor
    tok_emb: nn.Embedding | None
    ln_f: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(
        self,
        vocab_size: int = 512,
        d_model: int = 256,
        n_heads: int = 8,
        n_layers: int = 4,
        d_ff: int = 1024,
        max_seq: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, d_model)
        self.register_buffer("pos_emb", sinusoidal_positions(max_seq, d_model), persistent=False)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, d_ff, dropout) for _ in range(n_layers))
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = tokens if self.tok_emb is None else self.tok_emb(tokens) + self.pos_emb[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.ln_f is None or self.head is None else self.head(self.ln_f(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised input and added to it."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attn = SelfAttention(d_model, n_heads)
        self.ln2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model, d_ff)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        fed_forward: Tensor = self.drop(self.mlp(self.ln2(x)))
        return x + fed_forward


class SelfAttention(nn.Module):
    """Causal multi-head attention, [B, T, D] to [B, T, D]."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [B, T, 3D] to three of [B, H, T, D/H]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """The feed-forward layer of a block."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


def sinusoidal_positions(length: int, d_model: int) -> Tensor:
    """[length, d_model] of "Attention Is All You Need", section 3.5."""
    position = torch.arange(length).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table


def _stdlib_bytes(train_bytes: int, held_out_bytes: int) -> tuple[bytes, bytes]:
    """Source of the standard library, file by file in the order of their names, until there is enough of
    both.
    """
    train, held = bytearray(), bytearray()
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        target, wanted = (held, held_out_bytes) if number % HELD_OUT_EVERY == 0 else (train, train_bytes)
        if len(target) < wanted:
            target += path.read_bytes()
    if len(train) < train_bytes or len(held) < held_out_bytes:
        raise UserError(
            f"task 'tiny_lm': the standard library in {sysconfig.get_path('stdlib')} holds {len(train)} "
            f"bytes of source to train on and {len(held)} to hold out, not {train_bytes} and "
            f"{held_out_bytes}; lower the option samples"
        )
    return bytes(train[:train_bytes]), bytes(held[:held_out_bytes])
