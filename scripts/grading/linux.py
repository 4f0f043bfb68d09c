"""What the kernel offers to keep a process apart, called through ctypes: Linux only, no other program is needed.

Each function raises OSError, with the name of the call, where the kernel does not permit it.
"""

import ctypes
import os
import platform
import signal
import socket
import struct
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE, MS_BIND, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 0x1000, 2, 4

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_MOUNT_SETATTR = 442  # the number of the system call: the same on every architecture; Linux 5.12 and later
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def _call(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _prctl(what: str, option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    _call(f"prctl({what})", _libc.prctl(option, *arguments))


def become_subreaper() -> None:
    """From now on orphans among this process's descendants become its own children, whatever session they are in."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that made it ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name for new ones. A new PID namespace begins with the next child."""
    _call("unshare", _libc.unshare(flags))


def map_to_root(uid: int, gid: int) -> None:
    """In a new user namespace: be root in it, and the old user to everybody outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def mount(source: str, target: Path | str, kind: str, flags: int = 0, options: str = "") -> None:
    """`mount -t kind -o options source target`."""
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _call(f"mount({target})", _libc.mount(*arguments))


def private_mounts() -> None:
    """What is mounted from here on, nobody outside this mount namespace sees."""
    mount("none", "/", "none", MS_REC | MS_PRIVATE)


def set_read_only(target: Path | str, read_only: bool, recursive: bool) -> None:
    """Make a mount, with `recursive` also all below it, read-only or writable, in this mount namespace."""
    flag = _MOUNT_ATTR_RDONLY
    attributes = struct.pack("=4Q", flag if read_only else 0, 0 if read_only else flag, 0, 0)
    path, flags = os.fsencode(target), _AT_RECURSIVE if recursive else 0
    arguments = [ctypes.c_long(_AT_FDCWD), path, ctypes.c_uint(flags), attributes, ctypes.c_size_t(len(attributes))]
    _call("mount_setattr", _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments))


def loopback_up() -> None:
    """Switch on `lo`: in a new network namespace it is off, and ranks could not find each other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def drop_capabilities() -> None:
    """Give up for good what root may do beyond owning its files: mounting, tracing, killing others' processes."""
    for capability in range(64):
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the kernel knows no more of them
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    number = _CAPSET.get(platform.machine())
    if number is None:
        raise OSError(f"capset: not known for {platform.machine()}")
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call("capset", _libc.syscall(ctypes.c_long(number), header, none))
