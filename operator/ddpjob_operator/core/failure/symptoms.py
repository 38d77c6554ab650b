"""Known error messages of PyTorch, CUDA, NCCL, gloo and Linux, with a more specific reason and advice.

The reason of a trainer says how a rank ended; its message often says why. An entry has a reason of its own if a restart
rule could use it. The first entry that matches applies, so specific entries come before general ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from ddpjob_operator.api.validation import PATTERN_OPTIONS

GENERAL = frozenset({"WorkerException", "WorkerKilled", "Failed", "PodFailed", "OutOfMemory"})
"""Reasons that say how a rank ended, not why. A symptom may refine them."""


LOST = frozenset({"PeerLost", "RendezvousFailed"})


@dataclass(frozen=True, slots=True)
class Symptom:
    """An error message, and what it means if the failure has one of the reasons `of`."""

    words: str
    """A regular expression; case does not matter."""

    reason: str
    """Empty: the reason that the failure has."""

    advice: str
    of: frozenset[str] = GENERAL
    changes: bool = False
    """The next attempt does it differently, or it is not the program's doing: a second one is no repetition."""


_SCRIPT_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that a script causes, such as by an illegal memory access, and after which NVIDIA's device plugin keeps the GPU
(https://docs.nvidia.com/deploy/xid-errors). A defect may be followed by one, as 79 by 45.
"""


def _xid(numbers: Iterable[int]) -> str:
    return rf"\bxid( errors?)?( \(pci[^)]{{0,40}}\))?[ :]{{1,3}}({'|'.join(map(str, numbers))})\b"


_GPU = (
    Symptom(
        r"bind nvlink sharp \(nvls\) multicast memory",
        "NCCLError",
        "NVLink SHARP (NVLS) does not work on this node: restart its nvidia-fabricmanager, and reset its GPUs; until "
        "then set NCCL_NVLS_ENABLE=0.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"uncorrectable (ecc|nvlink) error|hardware stack error|fallen off the bus"
        rf"|{_xid(number for number in range(1000) if number not in _SCRIPT_XIDS)}",
        "GPUFault",
        "A GPU of this node is defective: drain the node, check `nvidia-smi -q` and the Xid lines in its kernel log.",
    ),
    Symptom(
        r"invalid access of peer gpu memory over nvlink or a hardware error",
        "GPUFault",
        "A GPU of this node, or one that it reaches over NVLink, failed: check the Xid lines in the kernel logs, and "
        "`nvidia-smi nvlink -e`. If it recurs here, drain the node.",
    ),
    Symptom(
        r"hw exception by gpu node",
        "GPUFault",
        "An AMD GPU of this node hung, or has a memory error: check the amdgpu lines in its kernel log. If it recurs "
        "here, drain the node.",
    ),
    Symptom(
        r"driver on your system is too old|driver version is insufficient|forward compatibility was attempted"
        r"|unsupported display driver|driver/library version mismatch|compiled with an unsupported toolchain",
        "DriverMismatch",
        "The node's NVIDIA driver is too old for the image's CUDA: update it, or use an image with an older CUDA.",
    ),
    Symptom(
        r"no hip gpus are available",
        "GPUMissing",
        "The pod sees no AMD GPU: set amd.com/gpu in resources.limits, and give the pod the group of /dev/kfd on the "
        "node, by its number (supplementalGroups in podTemplate's securityContext).",
    ),
    Symptom(
        r"no cuda gpus are available|found no nvidia driver|no cuda-capable device|no gpus found",
        "GPUMissing",
        "The pod sees no GPU: set nvidia.com/gpu in resources.limits, and check the node's device plugin.",
    ),
    Symptom(
        r"device\(s\) is/are busy or unavailable",
        "GPUMissing",
        "The GPU is in use, or hangs: look for other processes on the node and at its compute mode (`nvidia-smi`).",
    ),
    Symptom(
        r"system not yet initialized",
        "GPUMissing",
        "The node's GPUs are not ready: start its nvidia-fabricmanager, of the driver's version, or reset the GPUs.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"not compiled with cuda|doesn't have nccl built in|torch\._c' has no attribute '_cuda_",
        "CUDANotInImage",
        "The image's PyTorch is built for the CPU: use an image with CUDA, or let the job run on the CPU with gloo.",
    ),
    Symptom(
        r"no kernel image is available|device kernel image is invalid|invalid device function",
        "CUDANotInImage",
        "The image's PyTorch has no code for this node's GPU (torch.cuda.get_arch_list()): use an image that has, or a "
        "nodeSelector for other GPUs.",
    ),
    Symptom(
        r"invalid device ordinal|duplicate gpu detected|multiple ranks are using the same gpu",
        "TooFewGPUs",
        "Ranks share a GPU, or ask for one that the node lacks: take cuda:LOCAL_RANK in the script, not cuda:RANK or "
        "always cuda:0, and set procsPerNode to the limit of nvidia.com/gpu. Where time-slicing shares them, several "
        "of that limit may be one GPU: use one rank a pod, or whole GPUs.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"cuda unknown error|cuda driver initialization failed|unexpected error from cudagetdevicecount",
        "GPUMissing",
        "CUDA cannot start on this node: run `nvidia-smi` there, and look at the driver's lines in its kernel log.",
    ),
    Symptom(
        r"does not have a deterministic implementation",
        "NotDeterministic",
        "An operation has no deterministic kernel: use --no-deterministic, or another operation.",
    ),
    Symptom(
        r"device-side assert triggered",
        "CUDAError",
        "A CUDA kernel rejected its input, usually an index out of range: set CUDA_LAUNCH_BLOCKING=1 to find it.",
    ),
    Symptom(
        r"illegal memory access|unspecified launch failure|misaligned address|illegal instruction was encountered"
        r"|launch timed out and was terminated|(cuda|hip) error: unknown error|memory access fault by gpu node"
        rf"|{_xid(sorted(_SCRIPT_XIDS))}"
        r"|(cublas|cudnn|cusolver|cusparse)_status_(execution_failed|internal_error|mapping_error)"
        r"(_cu\w+|_unexpected_value|_compilation_failed|_bad_launch_param|_texture_creation_failed)?\b",
        "CUDAError",
        "A CUDA kernel crashed: set CUDA_LAUNCH_BLOCKING=1, or AMD_SERIALIZE_KERNEL=3 on AMD's GPUs, to find it. If "
        "only one node is affected, suspect its GPU.",
    ),
)


_BUCKETS = (
    Symptom(
        r"did not rename a folder|too many open files: '[^'\n]*' -> '",
        "",
        "The volume cannot rename folders, as a bucket that is mounted (gcsfuse, mountpoint-s3): use a file system for "
        "it, or a bucket with a hierarchical namespace.",
        of=GENERAL | {"StartError"},
    ),
)
"""Before the memory and the files of a process, which the same words may be about."""


_MEMORY = (
    Symptom(
        r"too many open files|received 0 items of ancdata",
        "TooManyOpenFiles",
        "Too many files are open: use fewer data loader workers, or torch.multiprocessing's file_system strategy.",
    ),
    Symptom(
        r"unable to mmap .{0,200}cannot allocate memory",
        "OutOfMemory",
        "The process has too many memory mappings, or too little memory: send fewer, larger tensors from data loader "
        "workers (NumPy arrays, whole batches), or raise vm.max_map_count on the node.",
    ),
    Symptom(
        r"nvml_success == .{0,120}internal assert failed at .{0,80}cudacachingallocator",
        "OutOfMemory",
        "The device ran out of memory, and torch could not ask NVML how much is in use: reduce the micro-batch, and "
        "check that `nvidia-smi` works in a pod on this node.",
    ),
    Symptom(
        r"the next attempt starts with micro-batches of",
        "OutOfMemory",
        "The next attempt halves the micro-batch and keeps the global batch. To start there, lower --micro-batch.",
        changes=True,
    ),
    Symptom(
        r"out of shared memory|insufficient shared memory|bus error|\bSIGBUS\b"
        r"|unable to (allocate shared memory|write to file </torch|open shared memory object)"
        r"|(?s:semlock\(.*)no space left on device|no space left on device.{0,80}(/dev/shm|/torch_\d+_\d+)"
        r"|shared memory segment /dev/shm.{0,80}no space left on device",
        "SharedMemoryFull",
        "The shared memory /dev/shm is full: raise placement.shmSize, or use fewer data loader workers.",
        of=GENERAL | {"DiskFull"},
    ),
    Symptom(
        r"the container's memory was used up",
        "OOMKilled",
        "",
    ),
    Symptom(
        r"defaultcpuallocator|\bmemoryerror|std::bad_alloc|\[errno 12\]",
        "OutOfMemory",
        "The host has too little memory for what the script asks for: raise resources.limits.memory, or load less at a "
        "time.",
    ),
    Symptom(
        r"cuda out of memory|out of memory|can't allocate memory|CUBLAS_STATUS_NOT_INITIALIZED|CUFFT_ALLOC_FAILED"
        r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w{1,40}_)?ALLOC(ATION)?_FAILED"
        r"|cuda allocation failed|can't allocate \d+ bytes on device|nvjpeg_status_allocator_failure",
        "OutOfMemory",
        "",
    ),
    Symptom(
        r"data ?loader worker.{0,400}(killed by signal: killed|exited unexpectedly)",
        "DataWorkerDied",
        "A data loader worker died, usually out of memory: raise its limit or shmSize, or use fewer workers.",
    ),
    Symptom(
        r"pin memory thread exited unexpectedly",
        "",
        "The thread that pins batches ended, and the pod's log has its error: most often too many open files (use "
        "torch.multiprocessing's file_system strategy), or a data loader worker that was killed for memory.",
    ),
    Symptom(
        r"unable to lock file, errno",
        "",
        "The HDF5 file is locked by another process, or its volume has no locks: open it with mode='r' on all ranks, "
        "and set HDF5_USE_FILE_LOCKING=FALSE.",
    ),
    Symptom(
        r"can't start new thread|resource temporarily unavailable|pthread_create failed",
        "TooManyThreads",
        "The pod cannot start more threads: use fewer data loader workers, or raise the kubelet's podPidsLimit.",
    ),
)


_RANKS = (
    Symptom(
        r"had already finished its script",
        "RankFinishedEarly",
        "A rank returned while another still called a collective: give all ranks the same number of steps "
        "(drop_last=True, DistributedSampler), or train within DDP's join().",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"expects same model across all ranks|appears not to match sizes of the same param",
        "CollectiveMismatch",
        "The ranks built different models: build the model from the same arguments and data on every rank.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"appears not to match strides of the same param",
        "CollectiveMismatch",
        "A parameter lies in memory in another order than on rank 0: give all ranks the same memory_format, or make it "
        "contiguous() before DDP.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"mismatch between collectives|collective mismatch|mismatched (collective|nccl version)|op\.preamble\.length"
        r"|message truncated",
        "CollectiveMismatch",
        "Ranks called different collectives, or with different sizes: look for a branch on the rank or on its data. "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names both. All pods must have the same NCCL.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"gloo.{0,200}unable to find (address|interface) for",
        "",
        "gloo found no such network interface on this node: correct or remove GLOO_SOCKET_IFNAME.",
    ),
    Symptom(
        r"this pod reaches none of the \d+ ranks of view",
        "",
        "The new pod cannot connect to the pods that train: check the NetworkPolicies of the namespace, the network of "
        "its node, and that no service mesh is between them.",
        changes=True,
    ),
    Symptom(
        r"gloo connectfullmesh failed",
        "",
        "gloo could not connect to another rank: check that pods reach each other on all ports (NetworkPolicies), that "
        "no service mesh is between them, and GLOO_SOCKET_IFNAME.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"store->get\('[^']*'\) got (error|exception): (socket timeout|wait timeout)|watchdog got stuck for",
        "CollectiveTimeout",
        "A rank did not join a collective in time: look for a rank that skips it, waits for data, is slow, or hangs in "
        "a CUDA call.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"store->get\('[^']*'\) got (error|exception)",
        "",
        "Rank 0, which hosts the store, went away before all ranks were connected: read the log of its pod.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"torchelastic/(role_info|assigned_ranks)/|keys: /[^/ ]{1,100}/MASTER_ADDR",
        "RendezvousFailed",
        "",
        of=LOST,
    ),
    Symptom(
        r"wait timeout after \d+ ?ms, keys: ",
        "",
        "A rank did not make the process group in time, although the store answers: look for one that is busy before "
        "init_process_group, as with a download, or raise its timeout.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"no socket interface found|neither AF_INET",
        "NCCLError",
        "NCCL found no network interface: correct or remove NCCL_SOCKET_IFNAME.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"call to ibv_\w+ failed with error cannot allocate memory",
        "NCCLError",
        "InfiniBand cannot lock memory: set LimitMEMLOCK=infinity for the node's container runtime. The capability "
        "IPC_LOCK helps only a container that runs as root.",
        of=GENERAL | LOST | {"OutOfMemory"},
    ),
    Symptom(
        r"mnnvl \(cliquesize \d+\) is available but not working",
        "NCCLError",
        "NVLink between nodes does not work here: give the pods an IMEX channel (resourceClaims in podTemplate), or "
        "set NCCL_MNNVL_ENABLE=0.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"failed to initialize any net plugin|last error:\W{1,6}error: network .{0,40}not found",
        "NCCLError",
        "NCCL has no network of the name in NCCL_NET: correct it, have the plugin's library where LD_LIBRARY_PATH "
        "finds it, and name its devices in the limits (vpc.amazonaws.com/efa of EFA); or remove NCCL_NET.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"NET/OFI .*unreachable remote",
        "",
        "No answer came over EFA: the security group of the nodes must allow all traffic from and to itself, in its "
        "inbound and its outbound rules, and the nodes must be in one subnet. If it worked before, check the other "
        "pods.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"NET/OFI .*(unresponsive re(mote|ceiver)|qp does not exist|reset by remote peer|peer closed its memory)",
        "",
        "NCCL lost another rank over EFA: check the other pods; if none failed, the EFA devices of both nodes.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"exiting prematurely\W{1,6}last error:\W{1,6}"
        r"NET/IB ?: ?Got completion from peer \S+ with (error |status=\w*\(?)(5|12|13)\b",
        "",
        "NCCL lost another rank over InfiniBand or RoCE: check the other pods; if none failed, the links of both nodes "
        "and the switch, and NCCL_IB_TIMEOUT.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"ibv_\w+ failed|communicator encountered a fatal error \(detected in ncclIb"
        r"|NET/IB ?: ?(Got completion|Attempted to connect incompatible|Remote \S+ device is incompatible)",
        "NCCLError",
        "InfiniBand or RoCE failed on this node: check the link and NCCL_IB_HCA, or set NCCL_IB_DISABLE=1 to compare.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"successfully reached monitoredbarrier, but received errors",
        "",
        "Another rank did not reach the barrier, or failed: rank 0 knows which; read the log of its pod.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r": operation timed out!|watchdog caught collective operation timeout|timed out waiting \d+ ?ms for (send|recv)"
        r"|monitoredbarrier",
        "CollectiveTimeout",
        "A rank did not join a collective in time: look for a rank that skips it, waits for data, or is slow.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"dump signal (from another rank|due to .{1,40} from +rank \d)",
        "",
        "Another rank has seen a collective time out or fail: the message has its number; read the log of its pod.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"ncclremoteerror|remote process exited or there was a network error",
        "",
        "NCCL lost another rank: check the other pods; if none failed, NCCL_SOCKET_IFNAME and the network, such as a "
        "service mesh between the pods.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"ncclsystemerror|ncclinternalerror|ncclunhandledcudaerror|ncclinvalidusage|unhandled (cuda|system) error",
        "NCCLError",
        "NCCL failed on this node: set NCCL_DEBUG=INFO and read the pod's log; check /dev/shm, network and GPUs.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"address already in use|EADDRINUSE",
        "AddressInUse",
        "Another process uses the port: a sidecar container, or with placement.hostNetwork another pod on the node.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"gloo.{0,200}(connection (closed|reset|timed out)|broken pipe|no route to host|network is unreachable)",
        "",
        "gloo lost another rank: check the other pods; if none failed, the network between the nodes.",
        of=GENERAL | LOST,
    ),
    Symptom(
        r"environment variable \w+ expected, but not set|process group has not been initialized"
        r"|keyerror: '(local_)?(rank|world_size)'"
        r"|default process group twice|destroy_process_group.{0,40}before",
        "ProcessGroupInit",
        "Call init_process_group once, with env://, and do not set RANK, WORLD_SIZE and similar variables yourself.",
    ),
    Symptom(
        r"training graph has changed in this iteration",
        "UnusedParameters",
        "static_graph=True says that all steps use the same parameters, and this one did not: leave it out, and pass "
        "find_unused_parameters=True to DDP.",
    ),
    Symptom(
        r"expected to have finished reduction in the prior iteration",
        "UnusedParameters",
        "Some parameters get no gradient: use all outputs in the loss, or pass find_unused_parameters=True to DDP.",
    ),
    Symptom(
        r"mark a variable ready only once",
        "",
        "DDP saw a parameter twice in one step: checkpoint with use_reentrant=False, or set static_graph=True.",
    ),
    Symptom(
        r"processexitedexception: process \d+ terminated with signal sigkill",
        "WorkerKilled",
        "A process that the script started (mp.spawn) was killed, usually for lack of memory: raise "
        "resources.limits.memory.",
    ),
    Symptom(
        r"process(raised|exited)exception",
        "",
        "A process that the script started (mp.spawn) failed: correct what its traceback names; in a job with several "
        "ranks, call the function of a rank directly, with the ranks in RANK, LOCAL_RANK and WORLD_SIZE.",
    ),
    Symptom(
        r"cannot re-initialize cuda in forked subprocess",
        "",
        "CUDA was used before a fork: start data loader workers with multiprocessing_context='spawn'.",
    ),
)


_FILES = (
    Symptom(
        r"snapshot of step \d+ could not be saved: .{0,400}the volume is full",
        "",
        "The volume at /mnt/shared is full: delete files, lower snapshots.keep, or expand the claim; then apply the "
        "job again.",
    ),
    Symptom(
        r"no space left on device: '/(tmp|root|home|var|opt|usr)/",
        "DiskFull",
        "The node's disk is full, not /mnt/shared: move caches to the volume (HF_HOME, TRITON_CACHE_DIR, "
        "TORCHINDUCTOR_CACHE_DIR, TMPDIR), or raise resources.requests.ephemeral-storage.",
        of=GENERAL | {"DiskFull"},
    ),
    Symptom(
        r"no space left on device|disk quota exceeded|inline_container.{0,80}unexpected pos"
        r"|pytorchstreamwriter failed writing",
        "DiskFull",
        "",
        of=GENERAL | {"StartError"},
    ),
    Symptom(
        r"read-only file system",
        "ReadOnlyFileSystem",
        "The container's root is read-only: write below /mnt/shared or /tmp, and mount the volume read-write.",
    ),
    Symptom(
        r"permission denied: '/mnt/shared",
        "PermissionDenied",
        "The volume is owned by another user: set fsGroup or runAsUser in podTemplate's securityContext.",
    ),
    Symptom(
        r"operation not permitted: '/mnt/shared[^'\n]*'([^ ]| [^-]|$)",
        "PermissionDenied",
        "The file belongs to another user, as all on an SMB share or in a mounted bucket may, and only that one may "
        "change its mode, times and owner: mount such a volume with the uid of the pods (mountOptions, uid=65532).",
    ),
    Symptom(
        r"permission denied",
        "PermissionDenied",
        "The container has no permission: write below /mnt/shared or /tmp, or set podTemplate's securityContext.",
    ),
    Symptom(
        r"stale file handle|input/output error|transport endpoint is not connected"
        r"|\[errno (5|107|108|116|117|121)\]|no snapshot in \S+ can be used, and these cannot be read",
        "VolumeError",
        "The storage server, or the mount on this node, failed: check the storage and the node's kernel log.",
    ),
    Symptom(
        r"cannot identify image file|image file is truncated|truncated file read|badzipfile|not a zip file"
        r"|pytorchstreamreader failed|error while deserializing|safetensorerror|invalid load key|ran out of input"
        r"|unsupported operand \d|crc check failed|crc-?32 error|incorrect data check|corruptsnapshoterror"
        r"|tarfile\.readerror|\bdatalosserror|parquet magic bytes not found|\(truncated file: eof = ",
        "DataCorrupted",
        "A file is corrupt or cut short: find what loads it in the traceback; download data again and verify "
        "/mnt/shared/datasets, or remove a checkpoint, so that the script resumes from one before it.",
    ),
    Symptom(
        r"unpicklingerror|weights only load failed",
        "UnsafeFile",
        "torch.load refuses pickled objects, which can run commands. Convert a file from elsewhere to safetensors. For "
        "a checkpoint of the job itself, pass weights_only=False; where a library loads it, as MMEngine 0.10 does, set "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in env, which holds for all files.",
    ),
)


_PROGRAM = (
    Symptom(
        r"\b(syntaxerror|indentationerror|taberror)\b",
        "",
        "The script is not valid Python: correct the line that the message names and apply the job again.",
        of=frozenset({"UserError"}),
    ),
    Symptom(
        r"does not exist in this image or on its volumes",
        "",
        "Put the script into the image or on the volume, or correct spec.entrypoint.script, and apply the job again.",
        of=frozenset({"UserError"}),
    ),
    Symptom(
        r"unrecognized arguments|the following arguments are required|invalid (choice|\w+ value)|expected \w+ argument"
        r"|--help` lists all flags",
        "",
        "Correct spec.args and apply the job again. A retry would fail in the same way.",
        of=frozenset({"UserError"}),
    ),
    Symptom(
        r"no module named 'ddp_trainer'",
        "TrainerMissing",
        "The image does not contain ddp_trainer: build it FROM the trainer image, or install the package.",
        of=GENERAL | {"ImportError", "StartError"},
    ),
    Symptom(
        r"lib(cu|nccl|nv)[\w.-]{0,64}: cannot open shared object",
        "",
        "A CUDA library is missing from the image: install the PyTorch that was built for the image's CUDA.",
        of=GENERAL | {"ImportError"},
    ),
    Symptom(
        r"modulenotfounderror|no module named|importerror",
        "ImportError",
        "",
    ),
    Symptom(
        r"mount_attr_idmap|support idmap mounts",
        "StartError",
        "User namespaces (hostUsers: false) need idmapped mounts, which the file system of a volume lacks, as NFS "
        "does: leave hostUsers out of podTemplate, or use another volume.",
        of=GENERAL | {"StartError", "ContainerCannotRun", "RunContainerError"},
    ),
    Symptom(
        r"executable file not found|no such file or directory: unknown|exec format error",
        "StartError",
        "The image cannot run the trainer: it needs python in PATH, and must be built for the node's CPU architecture.",
        of=GENERAL | {"StartError", "ContainerCannotRun", "RunContainerError"},
    ),
    Symptom(
        r"returned nan values|loss (is|was|became) (nan|inf|not finite)|non-?finite (loss|gradient)|nan (loss|or inf)",
        "LossNotFinite",
        "The loss is NaN or infinite: lower the learning rate, clip gradients, prefer bf16 to fp16, check the data.",
    ),
    Symptom(
        r"illegal header value b'bearer",
        "AccessDenied",
        "A token is empty, or has a line break in it: correct the Secret that env takes it from, or leave it out.",
    ),
    Symptom(
        r"\b(401|403) client error|gatedrepoerror|invalid (user )?token|repositorynotfounderror",
        "AccessDenied",
        "Access to a download was denied: accept the model's terms, and pass a token from a Secret in env.",
    ),
    Symptom(
        r"dataloader timed out after",
        "",
        "A data loader worker gave no batch in time: look for slow storage, or a worker that hangs; or raise the "
        "DataLoader's timeout.",
    ),
    Symptom(
        r"filenotfounderror|\[errno 2\]",
        "",
        "A file is missing: correct its path; files that pods need belong into the folder of the code, where "
        ".gitignore leaves out what it lists, into the image, or below /mnt/shared, which initializers can fill.",
    ),
    Symptom(
        r"name resolution|name or service not known|max retries exceeded with url|failed to resolve|urlopen error"
        r"|connection refused|cas service error"
        r"|(aiohttp|botocore|fsspec|httpcore|httpx|requests|urllib3)[\w.]*\."
        r"(\w*(chunkedencoding|connect|maxretry|payload|timeout)\w*error|(remote)?protocolerror)"
        r"|(httpcore|httpx|requests)[\w.]*\.(connect|read|write)timeout\b"
        r"|caught \w*(chunkedencoding|connect|maxretry|payload|protocol|timeout)\w* in "
        r"(dataloader worker|_(apply_udf|pin_memory_loop|populate_queue|sort_worker)\b)"
        r"|connectionerror: (server disconnected|couldn't reach '[^']{1,200}' on the hub \(\w*(connect|entry|timeout))"
        r"|\bcurl\b.*: exit (6|7|18|28|35|52|55|56|92) \(read\)"  # in a pipe of WebDataset
        r"|train\.data\.datasetlost\b"
        r"|\b(429|5\d\d) (client|server) error",
        "NetworkError",
        "A server could not be reached: download data with initializers, and check DNS and NetworkPolicies.",
    ),
)


_CRASH = (
    Symptom(
        r"stopped by a signal",
        "",
        "A process was stopped by SIGSTOP, not by the script: look for a debugger, or a tool that freezes processes. "
        "Stacks are in /mnt/shared/logs.",
        of=frozenset({"Stalled"}),
    ),
    Symptom(
        r"\((128 \+|256 -) sigkill",
        "",
        "A program that the script started was killed, usually for lack of memory: raise resources.limits.memory, and "
        "read the program's output.",
    ),
    Symptom(
        r"(free|malloc)\(\): |double free|corrupted (size|double|unsorted)|stack smashing|segmentation fault"
        r"|killed by sig(segv|bus|ill|fpe|abrt)",
        "",
        "A native library crashed: see the frames in the message, and check the versions of packages with C code. "
        "If only one node is affected, suspect its hardware.",
    ),
    Symptom(
        r"killed by sig(alrm|vtalrm|prof|usr1|usr2|int|quit|hup|trap|sys|pipe)",
        "",
        "The script, or a program beside it, sent this signal: look for signal.alarm, a timeout or a profiler.",
    ),
    Symptom(
        r"without a python exception; it printed nothing",
        "",
        "The script, or a library, ended the process without a message: look for os._exit and for exit() in C code.",
    ),
)

SYMPTOMS: tuple[Symptom, ...] = (*_GPU, *_BUCKETS, *_MEMORY, *_RANKS, *_FILES, *_PROGRAM, *_CRASH)


@lru_cache(maxsize=64)  # a plan asks several times about the failure that it decides on
def recognise(reason: str, text: str) -> Symptom | None:
    """The symptom that a failure of `reason` shows, whose words are somewhere in `text`."""
    encoded = _encoded(text)
    return next((one for one in SYMPTOMS if reason in one.of and _matches(f"(?i){one.words}", encoded)), None)


def found(pattern: str, text: str) -> bool:
    """Whether `pattern` (RE2 syntax, known to compile) matches somewhere in `text`."""
    return _matches(pattern, _encoded(text))


def _encoded(text: str) -> bytes:
    """As RE2 reads it, once for all patterns; half of a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace")


def _matches(pattern: str, encoded: bytes) -> bool:
    return _compiled(pattern).search(encoded) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    return re2.compile(pattern, PATTERN_OPTIONS)
