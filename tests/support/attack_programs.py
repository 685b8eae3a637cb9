"""Programs that try to leave a sandbox, or to exhaust the machine.

Each prints `ESCAPED` if it reaches something that it must not reach. What stands in ``target`` is
put in front of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sluice.sandbox.run_result import MIB, Limits

ESCAPED = "ESCAPED"
LIMITS = Limits(
    wall_s=2.0,
    memory_bytes=256 * MIB,
    tmp_bytes=16 * MIB,
    processes=32,
    open_files=32,
    output_bytes=MIB // 16,
)
HEAD = """
import ctypes, os, resource, signal, socket, sys, threading, time
print(os.readlink("/proc/self/ns/pid"), flush=True)
libc = ctypes.CDLL(None, use_errno=True)
escaped = lambda what: print("ESCAPED", what, flush=True)
"""


@dataclass(frozen=True, slots=True)
class AttackTarget:
    """What lies outside: a port and an abstract socket that listen, a file, and a process."""

    port: int
    socket: str
    file: str
    process: int
    secret: str


ATTACKS: Mapping[str, str] = {
    "connects to a port of the machine": """
s = socket.socket(); s.settimeout(1); s.connect(("127.0.0.1", port)); escaped("network")
""",
    "connects to an address of the internet": """
s = socket.socket(); s.settimeout(1); s.connect(("1.1.1.1", 53)); escaped("network")
""",
    "sends a datagram": """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("1.1.1.1", 53))
escaped("network")
""",
    "looks up a name": """
escaped(socket.getaddrinfo("example.org", 80))
""",
    "connects to an abstract socket of the machine": """
s = socket.socket(socket.AF_UNIX); s.connect("\\0" + sock); escaped("unix")
""",
    "opens a socket to the host of a virtual machine": """
socket.socket(40, socket.SOCK_STREAM); escaped("vsock")
""",
    "opens a raw socket": """
socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped("raw")
""",
    "reads the users of the machine": """
escaped(open("/etc/passwd").read())
""",
    "reads a file of the machine": """
escaped(open(file).read())
""",
    "lists homes": """
for folder in ("/home", "/root", "/work", "/var", "/sys", "/run"):
    if os.path.isdir(folder): escaped(os.listdir(folder))
""",
    "writes into the system": """
open("/usr/bin/evil", "w").write("x"); escaped("usr")
""",
    "writes into the root folder": """
open("/evil", "w").write("x"); escaped("root")
""",
    "fills the folder of devices": """
open("/dev/evil", "w").write("x"); escaped("dev")
""",
    "changes the program of core dumps": """
open("/proc/sys/kernel/core_pattern", "w").write("|/bin/sh"); escaped("core_pattern")
""",
    "drops the machine's caches": """
open("/proc/sys/vm/drop_caches", "w").write("1"); escaped("sysctl")
""",
    "triggers the kernel's keys": """
open("/proc/sysrq-trigger", "w").write("h"); escaped("sysrq")
""",
    "kills a process of the machine": """
os.kill(process, 9)
""",
    "kills everything": """
os.kill(-1, 9)
""",
    "stops the first process": """
os.kill(1, signal.SIGSTOP); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)
""",
    "lists the processes of the machine": """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
if len(pids) > 8: escaped(pids)
""",
    "reads secrets of the first process": """
text = open("/proc/1/environ").read() + str(os.environ)
if secret in text: escaped(text)
""",
    "traces the first process": """
if libc.ptrace(16, 1, 0, 0) == 0: escaped("ptrace")
""",
    "writes into the memory of the first process": """
open("/proc/1/mem", "r+b").close()
if libc.process_vm_readv(1, None, 0, None, 0, 0) == 0: escaped("memory")
""",
    "looks for files by the first process's root": """
for way in ("/proc/1/root", "/proc/1/cwd", "/proc/self/root"):
    if os.path.exists(way + file): escaped(way)
""",
    "follows a symbolic link out": """
os.symlink(file, "/tmp/link"); open("/tmp/link", "a").write("x")
if secret in open("/tmp/link").read(): escaped("link")
""",
    "uses inherited descriptors": """
for name in os.listdir("/proc/self/fd"):
    try: where = os.readlink("/proc/self/fd/" + name)
    except OSError: continue
    if int(name) > 2 and "/proc" not in where: escaped(where)
""",
    "becomes root": """
os.setuid(0); escaped("root")
""",
    "becomes root of a namespace of its own": """
if libc.unshare(0x10000000) == 0: escaped("userns")
pid = libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: escaped("userns by clone")
""",
    "mounts": """
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: escaped("mount")
if libc.umount2(b"/usr", 2) == 0: escaped("umount")
""",
    "makes a device": """
os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)); open("/tmp/disk", "rb").read(1)
escaped("disk")
""",
    "loads a program into the kernel": """
for numbers in ((321, 280), (425, 425), (323, 282), (298, 241), (250, 219)):
    number = numbers[0 if os.uname().machine == "x86_64" else 1]
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1: escaped(number)
""",
    "raises its limits": """
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); escaped("memory")
""",
    "forks without end": """
most = 0
while True:
    try:
        if os.fork() == 0: time.sleep(60)
        most += 1
        if most == 33: escaped(most)
    except OSError:
        break
""",
    "starts threads without end": """
most = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); most += 1
        if most == 33: escaped(most)
except RuntimeError:
    pass
os._exit(0)
""",
    "takes memory": """
held = bytearray(300 << 20); escaped(len(held))
""",
    "takes memory in many processes": """
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(100 << 20); time.sleep(60)
time.sleep(20); escaped("800 MiB")
""",
    "fills files in memory": """
size = 0
for folder in ("/tmp", "/dev/shm"):
    try:
        for number in range(8):
            with open(f"{folder}/{number}", "wb") as held:
                while held.tell() < 15 << 20: size += held.write(bytes(1 << 20))
    except OSError:
        pass
if size > 33 << 20: escaped(size)
""",
    "takes memory that no limit counts": """
try: os.memfd_create("x"); escaped("memfd")
except OSError: pass
if libc.shmget(0, 1 << 30, 0o1600) >= 0: escaped("shm")
""",
    "prints without end": """
while True: os.write(1, b"x" * 65536); os.write(2, b"y" * 65536)
""",
    "leaves processes behind that ignore signals": """
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        for descriptor in range(3): os.close(descriptor)
        while True: time.sleep(60)
""",
}
"""Forty attacks by name."""
WAITS = frozenset({"takes memory in many processes"})
"""Those that wait for their end, which the next look at their memory brings."""


def attack_program(name: str, target: AttackTarget) -> str:
    """Return the text of an attack on a target."""
    given = "".join(
        f"{'sock' if field == 'socket' else field} = {value!r}\n"
        for field, value in asdict(target).items()
    )
    return f"{HEAD}{given}{ATTACKS[name]}"
