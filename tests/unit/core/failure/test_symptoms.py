"""What failures say of themselves, in the words that a machine without a GPU cannot be made to say.

Each case names where the words stand. Those that can be provoked are in tests/unit/contracts/test_real_errors.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.core.failure.detect import Failure, Retry
from ddpjob_operator.core.failure.diagnosis import ADVICE, DETERMINISTIC, NODE_SUSPECT, diagnose
from ddpjob_operator.core.failure.symptoms import SYMPTOMS, Symptom, recognise
from ddpjob_operator.core.values.trainer_report import TerminationReport

NO_IDMAP = (
    "pod digits-0-0 exited with code 128: failed to create containerd task: failed to create shim task: OCI runtime "
    "create failed: runc create failed: unable to start container process: error during container init: failed to "
    "fulfil mount request: failed to set MOUNT_ATTR_IDMAP on /var/lib/kubelet/pods/0b0c/volumes/kubernetes.io~nfs/pv: "
    "invalid argument (maybe the filesystem used doesn't support idmap mounts on this kernel?): unknown"
)
NCCL_FILE = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77"


def case(source: str, reason: str, text: str, raw: str = "WorkerException") -> Any:
    return pytest.param(raw, text, reason, id=f"{reason}: {source}")


CASES = [
    case(
        "ddp_trainer/live/deciding.py",
        "WorkerException",
        "rank 1 raised ddp_trainer.live.deciding.Unreached: this pod reaches none of the 2 ranks of view 4, such as "
        "10.0.0.3: check whether the network of its node, a network policy or a proxy keeps the pods of this job apart",
    ),
    case(
        "ddp_trainer/client/run.py",
        "WorkerException",
        "rank 0 raised RuntimeError after step 46: the final snapshot of step 46 could not be saved: snapshot of step "
        "46 was not saved to /mnt/shared/checkpoints/x: the volume is full (0.5 MiB free, 2.8 MiB needed)",
    ),
    case(
        "ddp_trainer/root_cause.py",
        "OOMKilled",
        "rank 1 was killed by SIGKILL after step 7: the kernel ended it because the container's memory was used up",
        "OutOfMemory",
    ),
    case(
        "c10/cuda/CUDACachingAllocator.cpp",
        "OutOfMemory",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB "
        "is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use.",
    ),
    case("ddp_trainer/watchdog.py", "Stalled", "rank 0 in train, silent for 6 s, stopped by a signal", "Stalled"),
    case("Python", "OutOfMemory", "rank 0 raised MemoryError: MemoryError", "OutOfMemory"),
    case("the kernel", "WorkerKilled", "rank 0 was killed by SIGALRM; it printed nothing on stderr", "WorkerKilled"),
    case("cublas_api.h", "OutOfMemory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    case("cudaErrorECCUncorrectable", "GPUFault", "CUDA error: uncorrectable ECC error encountered"),
    case(
        "cudaErrorNvlinkUncorrectable",
        "GPUFault",
        "CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    case("ROCR-Runtime", "GPUFault", "HW Exception by GPU node-1 (Agent handle: 0x26) reason :ECC", "WorkerKilled"),
    case("ROCR-Runtime", "CUDAError", "Memory access fault by GPU node-1 (Agent handle: 0x267)", "WorkerKilled"),
    case("c10/hip/HIPFunctions.cpp", "GPUMissing", "No HIP GPUs are available"),
    case("hipErrorInvalidDeviceFunction", "CUDANotInImage", "HIP error: invalid device function"),
    case("cudaErrorHardwareStackError", "GPUFault", "CUDA error: hardware stack error"),
    case("DCGM", "GPUFault", "Detected XID errors: 94 on GPU 3"),
    case("the NVIDIA device plugin", "GPUFault", "GPU 3 reported Xid 63: marked as unhealthy"),
    case(
        "cudaErrorContained",
        "GPUFault",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    ),
    case("httpx", "AccessDenied", "rank 0 raised httpx.LocalProtocolError: Illegal header value b'Bearer '"),
    case("httpx", "NetworkError", "rank 0 raised httpx2.ReadTimeout: The read operation timed out"),
    case("httpx", "NetworkError", "rank 0 raised httpx.RemoteProtocolError: Server disconnected"),
    case(
        "requests",
        "NetworkError",
        "rank 0 raised requests.exceptions.ConnectionError after step 3: ('Connection aborted.', "
        "RemoteDisconnected('Remote end closed connection without response'))",
    ),
    case(
        "requests",
        "NetworkError",
        "rank 0 raised requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='data.example', port=443): Read timed "
        "out. (read timeout=10)",
    ),
    case(
        "requests",
        "NetworkError",
        "rank 0 raised requests.exceptions.ChunkedEncodingError after step 3: ('Connection broken: IncompleteRead(4096 "
        "bytes read, 8192 more expected)', IncompleteRead(4096 bytes read, 8192 more expected))",
    ),
    case("fsspec", "NetworkError", "rank 0 raised fsspec.exceptions.FSTimeoutError after step 9"),
    case(
        "aiohttp",
        "NetworkError",
        "rank 0 raised aiohttp.client_exceptions.ClientPayloadError after step 9: Response payload is not completed",
    ),
    case(
        "dali/core/mm",
        "OutOfMemory",
        "rank 0 raised RuntimeError after step 9: Critical error in pipeline:\nError when executing Mixed operator "
        "ImageDecoder encountered:\nCan't allocate 129499136 bytes on device 0.\nCurrent pipeline object is no longer "
        "valid.",
    ),
    case(
        "dali/core",
        "OutOfMemory",
        "rank 0 raised RuntimeError after step 9: Critical error in pipeline: CUDA allocation failed\nCurrent pipeline "
        "object is no longer valid.",
    ),
    case("tarfile.py", "DataCorrupted", "rank 0 raised tarfile.ReadError after step 3: unexpected end of data"),
    case(
        "tensorflow/core/lib/io/record_reader.cc",
        "DataCorrupted",
        "rank 0 raised tensorflow.python.framework.errors_impl.DataLossError: {{function_node}} corrupted record at 12",
    ),
    case(
        "arrow/cpp/src/parquet/file_reader.cc",
        "DataCorrupted",
        "rank 0 raised pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted "
        "or this is not a parquet file.",
    ),
    case(
        "hdf5/src/H5Fsuper_cache.c",
        "DataCorrupted",
        "rank 0 raised OSError: Unable to synchronously open file (truncated file: eof = 96, sblock->base_addr = 0, "
        "stored_eof = 2048)",
    ),
    case(
        "ddp_trainer/train/data.py",
        "NetworkError",
        "rank 1 raised ddp_trainer.train.data.DataSetLost after step 9: a connection was lost where samples are read, "
        "and no rank meets another there: catch in the data set what a storage or a database may raise, and read again "
        "(cannot read sample 7: [Errno 104] Connection reset by peer)",
    ),
    case("ENOSPC", "DiskFull", "[Errno 28] No space left on device: '/mnt/shared/runs/torch_2.6/last.pt'", "DiskFull"),
    case("ENOSPC", "SharedMemoryFull", "No space left on device: '/torch_71_3284018911_0'", "DiskFull"),
    case("the NVIDIA driver's kernel log", "GPUFault", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    case("an Xid that a script causes", "CUDAError", "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault"),
    case("the clean-up after a defect", "GPUFault", "Xid (PCI:0000:3b:00): 45, pid=7\nXid (PCI:0000:3b:00): 48, DBE"),
    case(
        "c10/cuda/CUDAFunctions.cpp",
        "DriverMismatch",
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
    ),
    case(
        "cudaErrorInsufficientDriver",
        "DriverMismatch",
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ),
    case(
        "c10/cuda/CUDAFunctions.cpp",
        "DriverMismatch",
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on "
        "non supported HW",
    ),
    case(
        "cudaErrorSystemDriverMismatch",
        "DriverMismatch",
        "Error 803: system has unsupported display driver / cuda driver combination",
    ),
    case("nvidia-smi", "DriverMismatch", "Failed to initialize NVML: Driver/library version mismatch"),
    case("c10/cuda/CUDAFunctions.cpp", "GPUMissing", "No CUDA GPUs are available"),
    case(
        "c10/cuda/CUDAFunctions.cpp",
        "GPUMissing",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver "
        "from http://www.nvidia.com/Download/index.aspx",
    ),
    case("cudaErrorNoDevice", "GPUMissing", "CUDA error: no CUDA-capable device is detected"),
    case("cudaErrorDevicesUnavailable", "GPUMissing", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    case("cudaErrorSystemNotReady", "GPUMissing", "CUDA error: system not yet initialized"),
    case(
        "c10/cuda/CUDAFunctions.cpp", "GPUMissing", "CUDA driver initialization failed, you might not have a CUDA gpu."
    ),
    case("c10d/ProcessGroupNCCL.cpp", "GPUMissing", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
    case(
        "cudaErrorNoKernelImageForDevice",
        "CUDANotInImage",
        "CUDA error: no kernel image is available for execution on the device",
    ),
    case("torch.cuda.set_device", "CUDANotInImage", "module 'torch._C' has no attribute '_cuda_setDevice'"),
    case("distributed_c10d.py", "CUDANotInImage", "Distributed package doesn't have NCCL built in"),
    case("cudaErrorInvalidDevice", "TooFewGPUs", "CUDA error: invalid device ordinal"),
    case(
        "nccl/src/init.cc",
        "TooFewGPUs",
        f"{NCCL_FILE}, invalid usage, NCCL version 2.26.2\nncclInvalidUsage: This usually reflects invalid usage "
        "of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    ),
    case(
        "ATen/Context.cpp",
        "NotDeterministic",
        "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'.",
    ),
    case("cudaErrorAssert", "CUDAError", "CUDA error: device-side assert triggered"),
    case("cudaErrorIllegalAddress", "CUDAError", "CUDA error: an illegal memory access was encountered"),
    case("cudaErrorLaunchFailure", "CUDAError", "CUDA error: unspecified launch failure"),
    case(
        "c10d/ProcessGroupNCCL.cpp",
        "CollectiveTimeout",
        "rank 0 was killed by SIGABRT; its last lines on stderr: [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) "
        "ran for 600081 milliseconds before timing out.",
        "PeerLost",
    ),
    case(
        "gloo/transport/tcp/unbound_buffer.cc",
        "CollectiveTimeout",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
        "operation to complete",
        "PeerLost",
    ),
    case(
        "c10d/NCCLUtils.cpp",
        "PeerLost",
        f"{NCCL_FILE}, remote process exited or there was a network error, NCCL version 2.26.2\nncclRemoteError: A "
        "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
        "socketPollConnect: connect returned Connection refused, exceeded error retry count (35)",
        "PeerLost",
    ),
    case(
        "c10d/NCCLUtils.cpp",
        "NCCLError",
        f"{NCCL_FILE}, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ),
    case(
        "gloo/transport/tcp/pair.cc",
        "PeerLost",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895",
        "PeerLost",
    ),
    case(
        "c10d/TCPStore.cpp",
        "RendezvousFailed",
        "The client socket has failed to connect to [10.96.0.7]:29500 (errno: 111 - Connection refused).",
        "RendezvousFailed",
    ),
    case(
        "torch/distributed/elastic/agent/server/api.py",
        "RendezvousFailed",
        "the nodes did not find each other: DistStoreError: wait timeout after 600000ms, keys: "
        "/0b0c-3/torchelastic/role_info/1",
        "RendezvousFailed",
    ),
    case(
        "torch/distributed/elastic/rendezvous/api.py",
        "RendezvousFailed",
        "the nodes did not find each other: DistStoreError: wait timeout after 600000ms, keys: /0b0c-3/MASTER_ADDR",
        "RendezvousFailed",
    ),
    case(
        "c10d/TCPStore.cpp",
        "RendezvousFailed",
        "rank 0 raised torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
        "RendezvousFailed",
    ),
    case(
        "c10d/socket.cpp",
        "AddressInUse",
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: "
        "-98, name: EADDRINUSE, message: address already in use",
        "RendezvousFailed",
    ),
    case(
        "torch/csrc/DataLoader.cpp",
        "SharedMemoryFull",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    case(
        "aten/src/ATen/MapAllocator.cpp",
        "OutOfMemory",
        "unable to mmap 1024 bytes from file <filename not specified>: Cannot allocate memory (12)",
    ),
    case(
        "c10/cuda/CUDACachingAllocator.cpp",
        "OutOfMemory",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154, please report '
        "a bug to PyTorch.",
    ),
    case(
        "nccl/src/transport/nvls.cc",
        "NCCLError",
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be "
        "performed in the present state'.",
    ),
    case(
        "c10d/ProcessGroupGloo.cpp",
        "PeerLost",
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
        "Please check rank 0 logs for faulty rank.",
        "PeerLost",
    ),
    case("c10d/Work.cpp", "CollectiveTimeout", "rank 0 raised RuntimeError: Operation timed out!", "PeerLost"),
    case(
        "gloo/transport/tcp/device.cc",
        "WorkerException",
        "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find "
        "address for: eth9",
    ),
    case(
        "h5py",
        "WorkerException",
        "[Errno 11] Unable to synchronously open file (unable to lock file, errno = 11, error message = 'Resource "
        "temporarily unavailable')",
    ),
    case("torch/utils/data/dataloader.py", "WorkerException", "DataLoader timed out after 120 seconds"),
    case("ENOSPC", "DiskFull", "[Errno 28] No space left on device: '/tmp/torchinductor_root/x'", "DiskFull"),
    case(
        "aten/src/ATen/MapAllocator.cpp",
        "SharedMemoryFull",
        "unable to write to file </torch_12_34_0>: No space left on device (28)",
        "DiskFull",
    ),
    case("torch/multiprocessing", "TooManyOpenFiles", "received 0 items of ancdata"),
    case(
        "torch/cuda/__init__.py",
        "WorkerException",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA "
        "with multiprocessing, you must use the 'spawn' start method",
    ),
    case(
        "ddp_trainer/memory.py",
        "OutOfMemory",
        "rank 1 ran out of memory in step 9 with micro-batches of 8 "
        "samples; the next attempt starts with micro-batches of 4 (CUDA out of memory.)",
        "OutOfMemory",
    ),
    case(
        "runpy",
        "TrainerMissing",
        "/usr/bin/python: Error while finding module specification for "
        "'ddp_trainer.launch' (ModuleNotFoundError: No module named 'ddp_trainer')",
        "Failed",
    ),
    case(
        "dlopen",
        "ImportError",
        "libcudart.so.12: cannot open shared object file: No such file or directory",
        "ImportError",
    ),
    case(
        "runc",
        "StartError",
        'failed to create containerd task: exec: "python": executable file not found in $PATH: unknown',
        "StartError",
    ),
    case("runc with user namespaces", "StartError", NO_IDMAP, "StartError"),
    case("requests", "AccessDenied", "401 Client Error: Unauthorized for url: https://models.example/gated"),
    case("pip", "NetworkError", "r.txt was not installed, since the package index answers with 524 Server Error; if"),
    case("requests", "NetworkError", "503 Server Error: Service Unavailable for url: https://data.example/x.tar"),
    case("a script of one's own", "LossNotFinite", "loss is nan at step 7, stopping"),
    case("nobody", "WorkerException", "rank 0 raised ValueError after step 3: the colour is wrong"),
    case("torch/csrc/DataLoader.cpp", "DataWorkerDied", "DataLoader worker (pid 71) is killed by signal: Killed. "),
    case("torch/utils/data/dataloader.py", "DataWorkerDied", "DataLoader worker (pid(s) 71) exited unexpectedly"),
    case(
        "torch/utils/data/dataloader.py",
        "DataWorkerDied",
        f"DataLoader worker (pid(s) {', '.join(map(str, range(1071, 1103)))}) exited unexpectedly",
    ),
    case("torch/utils/data/dataloader.py", "WorkerException", "Pin memory thread exited unexpectedly"),
    case("threading.py", "TooManyThreads", "can't start new thread"),
    case(
        "gcsfuse/internal/fs/fs.go",
        "StartError",
        "[Errno 24] Too many open files: '/mnt/shared/code/.part-1' -> '/mnt/shared/code/2aef9a49bd72'",
        "StartError",
    ),
    case(
        "ddp_trainer/snapshots/trust/store.py",
        "WorkerException",
        "rank 0 raised RuntimeError after step 46: the final snapshot of step 46 could not be saved: snapshot of step "
        "46 was not saved to /mnt/shared/checkpoints/x: the volume did not rename a folder (Too many open files), as",
    ),
    case("EMFILE", "TooManyOpenFiles", "[Errno 24] Too many open files: '/mnt/shared/datasets/7.tar'"),
    case(
        "torch/distributed/rendezvous.py",
        "ProcessGroupInit",
        "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
    ),
    case(
        "c10d/reducer.cpp",
        "UnusedParameters",
        "Expected to have finished reduction in the prior iteration before starting a new one.",
    ),
    case(
        "c10d/reducer.cpp",
        "UnusedParameters",
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
        "got used in the second iteration. this is not compatible with static_graph set to True.",
    ),
    case("EDQUOT", "DiskFull", "[Errno 122] Disk quota exceeded: '/mnt/shared/logs/x'"),
    case("EROFS", "ReadOnlyFileSystem", "[Errno 30] Read-only file system: '/opt/cache'"),
    case("EACCES", "PermissionDenied", "[Errno 13] Permission denied: '/mnt/shared/datasets'"),
    case("EACCES", "PermissionDenied", "[Errno 13] Permission denied: '/etc/models'"),
    case("cifs", "PermissionDenied", "ERROR: [Errno 1] Operation not permitted: '/mnt/shared/envs/.0/bin/activate'"),
    *(
        case(
            "ddp_trainer/snapshots/trust/store.py",
            "VolumeError",
            "SnapshotError: no snapshot in /mnt/shared/checkpoints/digits can be used, and these cannot be read: "
            f"step-000000005000 ({error}). They are left as they are; check the volume's server and its network",
        )
        for error in ("[Errno 110] Connection timed out", "[Errno 112] Host is down", "[Errno 5] Input/output error")
    ),
    case("EUCLEAN", "VolumeError", "[Errno 117] Structure needs cleaning: '/mnt/shared/datasets/7.tar'"),
    case("ESTALE", "VolumeError", "[Errno 116] Stale file handle: '/mnt/shared/datasets/7.tar'"),
    case(
        "ddp_trainer/root_cause.py",
        "RankFinishedEarly",
        "rank 0 raised RuntimeError after step 7: Connection closed by peer; rank 1 had already finished its script",
        "PeerLost",
    ),
    case("c10d/reducer.cpp", "CollectiveMismatch", "DDP expects same model across all ranks, but Rank 1 has 4 params"),
    case(
        "c10d/reducer.cpp",
        "CollectiveMismatch",
        "params[1] in this process with sizes [54275, 3] appears not to match strides of the same param in process 0.",
    ),
    case("gloo/transport/tcp/pair.cc", "CollectiveMismatch", "op.preamble.length <= op.nbytes. 1046204 vs 1040256"),
    case("c10d/ProcessGroupGloo.cpp", "PeerLost", "Gloo connectFullMesh failed with [pair.cc:144]", "PeerLost"),
    case(
        "c10d/ProcessGroupNCCL.cpp",
        "CollectiveTimeout",
        "retrieving ncclUniqueId from [0] by key '1', but store->get('1') got error: Socket Timeout",
        "PeerLost",
    ),
    case(
        "c10d/ProcessGroupNCCL.cpp",
        "PeerLost",
        "retrieving ncclUniqueId from [0] by key '0', but store->get('0') got error: Connection reset by peer",
        "PeerLost",
    ),
    case("nccl/src/bootstrap.cc", "NCCLError", "ncclInternalError: Last error:\nBootstrap : no socket interface found"),
    case("nccl/src/misc/ibvwrap.cc", "NCCLError", "Call to ibv_modify_qp failed with error Network is unreachable"),
    *(
        case("nccl/src/transport/net_ib", "NCCLError", f"ncclSystemError: Last error:\n{said}")
        for said in (
            "communicator encountered a fatal error (detected in ncclIbTest)",
            "NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_4:1/RoCE. Try selecting",
        )
    ),
    case("nccl/src/plugin/net.cc", "NCCLError", "ncclInvalidUsage: Last error:\nFailed to initialize any NET plugin"),
    case("nccl/src/net.cc", "NCCLError", "ncclInvalidUsage: Last error:\nError: network AWS Libfabric not found."),
    case(
        "aws-ofi-nccl/src/platform-aws.cpp",
        "PeerLost",
        "ncclRemoteError: A call failed. Last error:\nNET/OFI Request 0x7f0 (send) completed with error: err: 113, "
        "flags: 2, prov_errno: 15, strerror: Unreachable remote - never received a response, len: 0\n\n"
        "* This error indicates that the security group on either this instance or the peer instance\n",
        "PeerLost",
    ),
    case(
        "aws-ofi-nccl/src/nccl_ofi_rdma.cpp",
        "PeerLost",
        "ncclRemoteError: A call failed. Last error:\nNET/OFI Request 0x7f0 completed with error. RC: 103. Error: 13 "
        "(Unresponsive remote (was previously responsive)). Completed length: 0",
        "PeerLost",
    ),
    case("c10d/reducer.cpp", "WorkerException", "Expected to mark a variable ready only once."),
    case("torch/multiprocessing", "WorkerException", "torch.multiprocessing.spawn.ProcessRaisedException: "),
    case(
        "torch/multiprocessing",
        "WorkerKilled",
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
    ),
    case("compile", "UserError", "rank 0: invalid syntax (train.py, line 1) SyntaxError", "UserError"),
    case(
        "ddp_trainer/worker.py",
        "UserError",
        "rank 0: the script /mnt/shared/train.py does not exist in this image or on its volumes",
        "UserError",
    ),
    case("argparse", "UserError", "train.py: error: unrecognized arguments: --epoch 3", "UserError"),
    case("ENOENT", "WorkerException", "rank 0 raised FileNotFoundError: [Errno 2] No such file: 'train.csv'"),
    case(
        "ddp_trainer/root_cause.py",
        "WorkerKilled",
        "rank 0 exited with code 137 (128 + SIGKILL, as for a program that the signal ended)",
        "WorkerKilled",
    ),
    case(
        "glibc",
        "WorkerKilled",
        "rank 0 was killed by SIGABRT; its last lines on stderr: free(): invalid pointer",
        "WorkerKilled",
    ),
    case(
        "ddp_trainer/root_cause.py",
        "WorkerException",
        "rank 0 exited with code 9 without a Python exception; it printed nothing on stderr",
    ),
    case("zlib", "DataCorrupted", "Error -3 while decompressing data: incorrect data check"),
    case("torch/serialization.py", "UnsafeFile", "Weights only load failed. Unsupported global: GLOBAL posix.system"),
    case("importlib", "ImportError", "ModuleNotFoundError: No module named 'transformers'", "Failed"),
    case(
        "c10d/ProcessGroupNCCL.cpp",
        "PeerLost",
        "Observed flight recorder dump signal from another rank via TCPStore.",
        "PeerLost",
    ),
    case(
        "nccl/src/misc/ibvwrap.cc",
        "NCCLError",
        f"{NCCL_FILE}, unhandled system error\nncclSystemError: System call failed.\nLast error:\n"
        "Call to ibv_create_cq failed with error Cannot allocate memory errno 12",
    ),
    case(
        "nccl/src/mnnvl.cc",
        "NCCLError",
        "MNNVL (cliqueSize 4) is available but not working on this system. Check the IMEX configuration "
        "(nvidia-imex-ctl -N). Set NCCL_MNNVL_ENABLE=0 to ignore this issue.",
    ),
    case(
        "nccl/src/transport/net_ib/p2p.cc",
        "PeerLost",
        "rank 0 raised torch.distributed.DistBackendError after step 9: NCCL error in: c10d/ProcessGroupNCCL.cpp:3690, "
        "remote process exited or there was a network error, NCCL version 2.29.7\nncclRemoteError: A call failed "
        "possibly due to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB: Got completion "
        "from peer 10.0.0.7<51218> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0",
        "PeerLost",
    ),
]


@pytest.mark.parametrize(("raw", "text", "reason"), CASES)
def test_a_failure_is_known_by_its_words(raw: str, text: str, reason: str) -> None:
    found = diagnose(Failure(raw, text, Retry.YES))
    assert found.reason == reason
    assert found.advice


def test_a_volume_that_user_namespaces_cannot_use_is_not_blamed_on_the_image() -> None:
    advice = diagnose(Failure("StartError", NO_IDMAP, Retry.YES)).advice
    assert "hostUsers: false" in advice
    assert "image" not in advice


def test_the_exception_of_a_report_is_read_where_the_message_was_cut() -> None:
    report = TerminationReport(exception="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert diagnose(Failure("WorkerException", "rank 0 raised …", Retry.YES, report=report)).reason == "GPUFault"


def test_a_checkpoint_that_the_job_has_saved_can_be_loaded() -> None:
    """MMEngine 0.10 saves its history with each, and torch 2.6 and newer refuse it at the next attempt."""
    text = (
        "rank 0 raised _pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported global: "
        "GLOBAL mmengine.logging.history_buffer.HistoryBuffer was not an allowed global by default"
    )
    found = diagnose(Failure("WorkerException", text, Retry.YES))
    assert found.reason == "UnsafeFile"
    assert "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in env" in found.advice


@pytest.mark.parametrize("raw", ["UserError", "Fenced", "Preempted", "Evicted", "PodDeleted", "OOMKilled", "NodeLost"])
def test_a_reason_that_says_why_is_kept_whatever_the_words(raw: str) -> None:
    text = "CUDA out of memory; No module named x; Permission denied; Watchdog caught collective operation timeout"
    assert diagnose(Failure(raw, text, Retry.YES)).reason == raw


def test_a_shortage_that_the_next_attempt_avoids_is_no_repetition() -> None:
    lowered = "rank 1 ran out of memory in step 9; the next attempt starts with micro-batches of 4"
    smallest = "rank 1 ran out of memory in step 9; there is no smaller one"
    assert not diagnose(Failure("OutOfMemory", lowered, Retry.YES)).deterministic
    assert diagnose(Failure("OutOfMemory", smallest, Retry.YES)).deterministic


@pytest.mark.parametrize("key", ["MASTER_ADDR", "torchelastic/role_info/1", "torchelastic/assigned_ranks/1"])
def test_of_a_node_that_waits_for_another_nobody_is_asked_to_look_for_a_busy_rank(key: str) -> None:
    """None has begun: the ports may be closed between them."""
    text = f"the nodes did not find each other: DistStoreError: wait timeout after 600000ms, keys: /0b0c-3/{key}"
    assert diagnose(Failure("RendezvousFailed", text, Retry.YES)).advice == ADVICE["RendezvousFailed"]


def test_every_entry_is_the_first_to_match_some_text() -> None:
    shown = {recognise(*one.values[:2]) for one in CASES}
    assert [one.words for one in SYMPTOMS if one not in shown] == []


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: f"{symptom.reason} {symptom.words[:30]}")
def test_every_entry_is_a_pattern_and_gives_one_sentence(symptom: Symptom) -> None:
    assert re2.compile(symptom.words)
    sentence = symptom.advice or ADVICE[symptom.reason]
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_reasons_that_are_judged_are_reasons_that_are_given() -> None:
    given = {one.reason for one in SYMPTOMS} | set(ADVICE) | {"Failed", "PodFailed", "ContainerCannotRun"}
    assert (DETERMINISTIC | NODE_SUSPECT) - given == {"TopologyAffinityError", "UnexpectedAdmissionError"}


@given(st.text(max_size=200), st.sampled_from(sorted(set(itertools.chain(*(one.of for one in SYMPTOMS))))))
def test_whatever_a_container_says_something_is_made_of_it(text: str, reason: str) -> None:
    assert diagnose(Failure(reason, text, Retry.YES)).reason
