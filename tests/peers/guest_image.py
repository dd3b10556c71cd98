"""What guests boot from: Debian's kernels, an initramfs for each, and one disk of tools for all.

Kernels are downloaded and unpacked, never installed. Everything lands in one folder and is made once;
a changed recipe makes it anew.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Kernel", "build_kernel", "build_tools"]

_INIT = Path(__file__).parent / "init"

_BACKPORTS = "bookworm-backports main"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_META = "linux-image-cloud-amd64"

_EARLY = ["virtio_pci", "virtio_blk"]
_LATER = [
    *_EARLY, "virtio_net", "virtio_console", "virtio_rng", "configfs", "crc32c_intel", "crc32c_generic",
    "nvme_core", "nvme_fabrics", "nvme_tcp", "nvmet", "nvmet_tcp", "nvme_auth", "dh_generic", "hmac",
    "sha256_generic", "sha512_generic",
]  # fmt: skip
"""Kernels that lack one (nvme_auth before 6.7) do without."""

_PROGRAMS = ["/usr/sbin/nvme", "/usr/bin/fio", "/usr/sbin/e2fsck"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that can be booted.

    Attributes:
        version: as `uname -r` says it.
        image: vmlinuz.
        initramfs: with what mounts the tools' disk.
        modules: /lib/modules/VERSION of the guest, whole.
    """

    version: str
    image: Path
    initramfs: Path
    modules: Path


def build_kernel(folder: Path, *, backports: bool = False) -> Kernel:
    """Debian 12's kernel for virtual machines, or the one of its backports.

    Raises:
        subprocess.CalledProcessError: it cannot be downloaded, or a tool fails; with its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "tree"
    if not (folder / "unpacked").exists():
        shutil.rmtree(tree, ignore_errors=True)
        _run("dpkg-deb", "-x", str(_download(folder, backports=backports)), str(tree))
        (folder / "unpacked").touch()
    version = next((tree / "lib/modules").iterdir()).name
    recipe = hashlib.sha256(_INIT.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    modules = folder / f"modules-{recipe}"
    initramfs = folder / f"initramfs-{recipe}"
    if not initramfs.exists():
        _run("depmod", "-b", str(tree), version)
        _copy_modules(tree, version, _LATER, modules)
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        for name in ("bin", "dev", "proc", "disk"):
            (root / name).mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin")
        shutil.copy(_INIT, root / "init")
        _copy_modules(tree, version, _EARLY, root)
        packed = initramfs.with_suffix(".part")
        _run(
            "sh", "-c", f"find . | cpio -o -H newc --quiet | gzip -1 >{packed.absolute()}", cwd=root
        )
        packed.rename(initramfs)
    return Kernel(version, tree / f"boot/vmlinuz-{version}", initramfs, modules)


def build_tools(folder: Path, kernels: list[Kernel]) -> Path:
    """A read-only ext4 disk: programs, their libraries, all kernels' modules."""
    names = " ".join(str(kernel.modules) for kernel in kernels)
    disk = folder / f"tools-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if disk.exists():
        return disk
    root = folder / "tools-root"
    shutil.rmtree(root, ignore_errors=True)
    for name in (
        "bin",
        "sbin",
        "dev",
        "etc/nvme",
        "proc",
        "run",
        "sys",
        "tmp",
        "tools",
        "mnt",
        "lib64",
    ):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for applet in _run("/bin/busybox", "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "sbin/modprobe").symlink_to("../bin/busybox")  # the kernel asks it for what it lacks
    for program in _PROGRAMS:
        for file in [program, *re.findall(r"(/\S+) \(0x", _run("ldd", program))]:
            copied = root / file.lstrip("/")
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
    for kernel in kernels:
        shutil.copytree(kernel.modules, root, dirs_exist_ok=True)
    shutil.copy(_INIT, root / "init")
    part = disk.with_suffix(".part")
    part.unlink(missing_ok=True)
    _run("mkfs.ext4", "-q", "-O", "^has_journal", "-d", str(root), str(part), "192M")
    part.rename(disk)
    shutil.rmtree(root)
    return disk


def _download(folder: Path, *, backports: bool) -> Path:
    options: list[str] = []
    if backports:
        # Lists of its own: the system's sources stay as they are.
        lists, cache, sources = folder / "lists", folder / "cache", folder / "sources.list"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        (cache / "archives/partial").mkdir(parents=True, exist_ok=True)
        sources.write_text(f"deb [signed-by={_KEYRING}] {_mirror()} {_BACKPORTS}\n")
        given = {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": lists,
            "Dir::Cache": cache,
            # Root's apt becomes _apt, who may pass neither a private folder nor a closed /tmp.
            "APT::Sandbox::User": "root",
        }
        options = [
            word
            for name, value in given.items()
            for word in ("-o", f"{name}={value.absolute() if isinstance(value, Path) else value}")
        ]
        _run("apt-get", *options, "update", "-q")
    try:
        needed = _run("apt-cache", *options, "depends", _META)
    except RuntimeError:  # the lists may be absent
        _run("apt-get", *options, "update", "-q")
        needed = _run("apt-cache", *options, "depends", _META)
    package = re.search(r"Depends: (linux-image-\S+)", needed)
    if package is None:
        raise RuntimeError(f"apt-cache knows no kernel behind {_META}: {needed!r}")
    _run("apt-get", *options, "download", "-q", package[1], cwd=folder)
    return next(folder.glob(f"{package[1]}_*.deb"))


def _mirror() -> str:
    """Where this system has Debian from."""
    known = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm")
    mirrors = [line.rstrip("/") for line in known.splitlines() if line]
    if not mirrors:
        raise RuntimeError(
            "apt knows no mirror of bookworm: run apt-get update, or add one to its sources"
        )
    return mirrors[0]


def _copy_modules(tree: Path, version: str, names: list[str], root: Path) -> None:
    """Modules and what they need, unpacked, with their index."""
    wanted: set[Path] = set()
    for name in names:
        shown = subprocess.run(
            ["modprobe", "-d", tree, "-S", version, "--show-depends", name],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
        )  # fmt: skip
        wanted.update(
            Path(file) for file in re.findall(r"^insmod (\S+)", shown.stdout, re.MULTILINE)
        )
    for file in wanted:
        copied = root / file.relative_to(tree.absolute() if file.is_absolute() else tree)
        copied.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".xz":
            copied.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
        else:
            shutil.copy(file, copied)
    for index in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(tree / "lib/modules" / version / index, root / "lib/modules" / version)
    _run("depmod", "-b", str(root), version)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout
