"""Run by ``sandbox`` as a script of its own: lock this process in, then become Python on the program from stdin.

Standard library only, nothing of the package.  Arguments: a JSON object of limits.  In order: new namespaces of user,
mounts, network and processes; a file system that can only be read; a small empty working directory in memory; limits
on resources; a filter that refuses new processes, sockets and mounts.  Exit status 97: the system refuses one of these,
written to stderr, and nothing was run.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

REFUSED = 97
_NEW_USER, _NEW_MOUNTS, _NEW_NETWORK, _NEW_PROCESSES = 0x10000000, 0x20000, 0x40000000, 0x20000000
_NO_NEW_PRIVILEGES, _SECCOMP, _DEATH_SIGNAL = 38, 22, 1
_MOUNT_SETATTR, _RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_AT_CWD = -100
_NOBODY = 65534
_EPERM = 1
# Calls that a program with tests has no use for: new processes and threads, sockets, mounts, namespaces, tracing.
_DENIED = {
    "x86_64": (0xC000003E, (41, 53, 56, 57, 58, 101, 165, 166, 272, 298, 308, 321, 425, 428, 429, 430, 435, 442)),
    "aarch64": (0xC00000B7, (198, 199, 220, 117, 40, 39, 97, 241, 268, 280, 425, 428, 429, 430, 435, 442)),
}


def main() -> None:
    limits = json.loads(sys.argv[1])
    if limits["isolated"]:
        try:
            _leave_the_machine(limits)
        except (OSError, AttributeError) as error:
            print(f"this system refuses to lock programs in: {error}", file=sys.stderr)
            sys.exit(REFUSED)
    _limit(limits)
    if limits["isolated"]:
        _filter_calls()
    os.execv(sys.executable, [sys.executable, "-I", "-"])


def _leave_the_machine(limits: dict[str, int]) -> None:
    """Go on as the first process of namespaces of its own; the process that was started only waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.machine() not in _DENIED:
        raise OSError(f"no list of system calls for {platform.machine()}")
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    outside = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    _check(libc.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_NETWORK | _NEW_PROCESSES), "namespaces")
    _write("setgroups", "deny")
    for name, number in outside.items():  # without a number inside, nothing can be written even where it may
        _write(name, f"{_NOBODY} {number} 1")
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    size = len(attributes)
    _check(libc.syscall(_MOUNT_SETATTR, _AT_CWD, b"/", _RECURSIVE, attributes, size), "a read-only file system")
    folder = os.getcwd().encode()
    _check(libc.mount(b"tmpfs", folder, b"tmpfs", 0, f"size={limits['disk_bytes']}".encode()), "a working directory")
    os.chdir(folder)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _limit(limits: dict[str, int]) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _filter_calls() -> None:
    """Refuse the calls above from here on: root is not held by a limit on processes.  seccomp(2), mode 2."""
    architecture, denied = _DENIED[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | _EPERM, 0x7FFF0000
    count = len(denied)  # jumps are so many steps ahead of the next one, to the last three
    steps = [(load, 0, 0, 4), (equal, 0, count + 4, architecture), (load, 0, 0, 0), (at_least, count + 2, 0, 1 << 30)]
    steps += [(equal, count - place, 0, number) for place, number in enumerate(denied)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse), (answer, 0, 0, kill)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SECCOMP, 2, program, 0, 0):
        print("this system refuses to filter system calls", file=sys.stderr)
        os._exit(REFUSED)


def _write(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
