"""The image that the project's own is built from: there, pulled, or a stand-in.

The stand-in is for machines that reach no registry: files of this Debian's essential packages and
of the Python 3.11 that runs here. It holds this machine's accounts: publish it nowhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tools.commands import CommandError, output_of, succeeds

STAND_IN_LABEL = "sluice.stand-in"
_PULL_WITHIN_S = 300.0
_MADE_WITHIN_S = 300.0
# Beyond the essential ones: what Python's own modules, TLS and `useradd` load.
# fmt: off
_PACKAGES = (
    "adduser", "ca-certificates", "libacl1", "libattr1", "libaudit1", "libbsd0", "libbz2-1.0",
    "libc6", "libcap-ng0", "libcap2", "libcom-err2", "libcrypt1", "libexpat1", "libffi8",
    "libgcc-s1", "libgdbm6", "libgmp10", "libgssapi-krb5-2", "libk5crypto3", "libkeyutils1",
    "libkrb5-3", "libkrb5support0", "liblz4-1", "liblzma5", "libmd0", "libncursesw6", "libnsl2",
    "libpam-modules", "libpam-runtime", "libpam0g", "libpcre2-8-0", "libreadline8", "libselinux1",
    "libsemanage2", "libsepol2", "libsqlite3-0", "libssl3", "libstdc++6", "libsystemd0",
    "libtinfo6", "libtirpc3", "libuuid1", "libzstd1", "netbase", "openssl", "passwd", "tzdata",
    "zlib1g",
)
# fmt: on
_LEFT_OUT = ("/usr/share/doc/", "/usr/share/info/", "/usr/share/locale/", "/usr/share/man/")
_TOP = ("bin", "sbin", "lib", "lib64")
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


class NoBaseImageError(Exception):
    """Why there is no base image."""


def base_image(tag: str) -> str:
    """Provide the image `tag`; return where it came from.

    Raises:
        NoBaseImageError: it is not here, cannot be pulled, and this machine makes no stand-in.
    """
    if succeeds("docker", "image", "inspect", tag, timeout_s=30):
        return "was here"
    try:
        output_of("docker", "pull", "-q", tag, timeout_s=_PULL_WITHIN_S)
    except CommandError as error:
        pulling = str(error).splitlines()[-1].strip()
    else:
        return "pulled"
    try:
        _make_stand_in(tag)
    except (CommandError, OSError, subprocess.SubprocessError) as error:
        raise NoBaseImageError(f"{tag} cannot be pulled ({pulling}), nor made: {error}") from error
    return "a stand-in made of this machine's files"


def _make_stand_in(tag: str) -> None:
    if os.geteuid() != 0 or sys.version_info[:2] != (3, 11) or not shutil.which("dpkg-query"):
        raise OSError("a stand-in takes Debian, root, and this program run by Python 3.11")
    if find_spec("ensurepip") is None or sys.base_prefix == "/usr":
        raise OSError(
            "a stand-in takes a Python 3.11 with pip of its own, and Debian's comes without: give "
            "another one (make compose-test PYTHON=/path/to/python3.11)"
        )
    with tempfile.TemporaryDirectory(prefix="sluice-base-") as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        _make_tree(root)
        _copy_packages(root)
        _copy_python(root)
        _copy_certificates(root)
        output_of("chroot", scratch, "/sbin/ldconfig", timeout_s=60)
        _add_pip(root)
        _import(root, tag)


def _make_tree(root: Path) -> None:
    for name in _TOP:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr/local"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)


def _copy_packages(root: Path) -> None:
    query = ("dpkg-query", "-Wf", "${Essential} ${Package} ${db:Status-Status}\n")
    listed = [line.split() for line in output_of(*query, timeout_s=60).splitlines()]
    installed = {words[1] for words in listed if len(words) == 3 and words[2] == "installed"}
    essential = {words[1] for words in listed if words[:1] == ["yes"]}
    names = sorted(installed & {*essential, *_PACKAGES})
    files = output_of("dpkg-query", "-L", *names, timeout_s=60).splitlines()
    found = ["etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", *_in_packages(files)]
    _copy(Path("/"), root, found)


def _in_packages(files: Iterable[str]) -> Iterator[str]:
    """Yield files and links, by the places that /bin and the like lead to."""
    for name in sorted(set(files)):
        path = Path(name)
        if name.startswith(_LEFT_OUT) or not (path.is_symlink() or path.is_file()):
            continue
        first = path.parts[1]
        yield f"usr{name}" if first in _TOP else name.lstrip("/")


def _copy_python(root: Path) -> None:
    prefix = Path(sys.base_prefix)
    wanted = ["bin/python3.11", *(f"bin/{name}" for name in ("python3", "python"))]
    skip = ("__pycache__", "test", "site-packages", "config-3.11-x86_64-linux-gnu")
    shutil.copytree(
        prefix / "lib",
        root / "usr/local/lib",
        symlinks=True,
        ignore=shutil.ignore_patterns(*skip, "*.a"),
        dirs_exist_ok=True,
    )
    _copy(prefix, root / "usr/local", [name for name in wanted if (prefix / name).exists()])
    (root / "usr/local/lib/python3.11/site-packages").mkdir(exist_ok=True)


def _copy_certificates(root: Path) -> None:
    """Copy the authorities that this machine trusts: it may reach its package index through one."""
    target = root / _CERTIFICATES
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path("/") / _CERTIFICATES, target)
    (root / "etc/pip.conf").write_text(f"[global]\ncert = /{_CERTIFICATES}\n", encoding="utf-8")


def _add_pip(root: Path) -> None:
    inside = ("env", "-i", f"PATH={_PATH}", "chroot", str(root), "python3.11", "-m", "ensurepip")
    output_of(*inside, timeout_s=120)
    (root / "usr/local/bin/pip").unlink(missing_ok=True)
    (root / "usr/local/bin/pip").symlink_to("pip3")


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files and links with owners and modes."""
    listed = "\n".join(names).encode()
    # fmt: off
    pack = subprocess.run(
        ["tar", "-C", str(source), "--no-recursion", "--ignore-failed-read", "-cf", "-", "-T", "-"],
        input=listed, capture_output=True, timeout=_MADE_WITHIN_S, check=True,
    )
    subprocess.run(
        ["tar", "-C", str(target), "-xf", "-"],
        input=pack.stdout, capture_output=True, timeout=_MADE_WITHIN_S, check=True,
    )
    # fmt: on


def _import(root: Path, tag: str) -> None:
    changes = (f"ENV PATH={_PATH} LANG=C.UTF-8", 'CMD ["python3"]', f"LABEL {STAND_IN_LABEL}=1")
    options = [word for change in changes for word in ("--change", change)]
    archive = root.with_name(f"{root.name}.tar")
    try:
        tree = ("tar", "-C", str(root), "--numeric-owner", "-cf", str(archive), ".")
        output_of(*tree, timeout_s=_MADE_WITHIN_S)
        output_of("docker", "import", *options, str(archive), tag, timeout_s=_MADE_WITHIN_S)
    finally:
        archive.unlink(missing_ok=True)
