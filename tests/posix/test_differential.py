"""Programs that nobody changed do under the shim what they do without it, and are served by it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from posix_placing import run

COMMANDS = {
    "cat": "cat {root}/f*.bin {root}/empty {root}/link",
    "md5sum": "cd {root} && md5sum f*.bin link ./deep/er/../er/text.txt",
    "wc": "wc {root}/deep/er/text.txt {root}/folder/er/text.txt",
    "head and tail": "head -c 100 {root}/f09.bin; tail -c 33 {root}/f08.bin; tail -n 2 < {root}/deep/er/text.txt",
    "cp": "cp -a {root} {scratch}/copy && cd {scratch}/copy && stat -c '%n %s %Y %a %F' * deep/er/*; cat f*",
    "tar": "tar -C {root} -c --sort=name . | sha256sum",
    "dd": "dd if={root}/f10.bin bs=100 skip=3 count=7 status=none | od -c",
    "sort": "sort {root}/deep/er/text.txt | cksum",
    "cmp": "cmp {root}/f03.bin {root}/link && ! cmp {root}/f03.bin {root}/f04.bin",
    "diff": "diff {root}/deep/er/text.txt <(head -n 400 {root}/folder/er/text.txt)",
    "a shell's redirection": "while read -r l; do echo \"$l\"; done < {root}/deep/er/text.txt | sum",
    "a shell's script": ". {root}/../script.sh; exec 5< {root}/f02.bin; cat <&5; exec 5<&-",
    "of a descriptor": "cat /dev/fd/7 7< {root}/f02.bin; stat -L -c '%s %i %Y' /dev/fd/7 7< {root}/f05.bin",
}  # fmt: skip
LOOKS = {
    "what is not there": "cat {root}/none {root}/f01.bin/ {root}/deep {root}/../none; ls {root}/none",
    "stat": "cd {root} && stat * deep/er/*; stat -L link; stat -f -c %T .",
    "ls": "ls -laiR --time-style=full-iso {root}",
    "find": "find {root} -printf '%p %s %T@ %i %y %m\\n' | sort",
    "test": "for f in {root}/*; do test -r $f && test -f $f && echo $f; done",
    "du": "du -ab {root}",
}

PYTHON = {
    "open": "import sys; print(hash_of(open(p, 'rb').read() for p in paths))",
    "text": "print(open(root + '/deep/er/text.txt').readlines()[-3:])",
    "pathlib": "import pathlib; print(hash_of(p.read_bytes() for p in sorted(pathlib.Path(root).rglob('*.bin'))))",
    "os.open": "fds = [os.open(p, os.O_RDONLY) for p in paths]; print(hash_of(os.pread(f, 900, 10) for f in fds), [fcntl.fcntl(f, fcntl.F_GETFL) for f in fds], [fcntl.fcntl(f, fcntl.F_GETFD) for f in fds])",
    "dir_fd": "d = os.open(root, os.O_RDONLY); print(os.read(os.open('f05.bin', os.O_RDONLY, dir_fd=d), 50), os.stat('f05.bin', dir_fd=d))",
    "relative": "os.chdir(root + '/deep'); print(open('../f07.bin', 'rb').read(20), open('er/../../f07.bin', 'rb').read(9), open('./er//text.txt').read(9))",
    "fstat": "print([tuple(os.fstat(os.open(p, os.O_RDONLY))) for p in paths])",
    "stat": "print([tuple(os.stat(p)) + tuple(os.lstat(p)) for p in [*paths, root + '/link']], [os.stat(p).st_mtime_ns for p in paths])",
    "seek": "f = open(root + '/f09.bin', 'rb'); f.seek(-7, 2); print(f.read(), f.tell(), os.lseek(f.fileno(), 3, 0), os.read(f.fileno(), 4))",
    "mmap": "f = open(root + '/f09.bin', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(hash_of([m[:]]), len(m))",
    "private mmap": "f = open(root + '/f09.bin', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY); m[0:3] = b'abc'; print(hash_of([m[:]]), hash_of([open(root + '/f09.bin', 'rb').read()]))",
    "two offsets": "a, b = open(root + '/f09.bin', 'rb', 0), open(root + '/f09.bin', 'rb', 0); print(a.read(5), b.read(3), a.read(2))",
    "dup": "a = os.open(root + '/f09.bin', os.O_RDONLY); b = os.dup(a); print(os.read(a, 5), os.read(b, 5), os.fstat(b))",
    "writing to it fails": "f = os.open(root + '/f09.bin', os.O_RDONLY)\ntry: os.write(f, b'x')\nexcept OSError as e: print(e)",
    "sendfile": "r, w = os.pipe(); f = os.open(root + '/f03.bin', os.O_RDONLY); print(os.sendfile(w, f, 0, 500), hash_of([os.read(r, 500)]))",
    "shutil": "shutil.copy2(root + '/f05.bin', scratch + '/x'); print(os.stat(scratch + '/x').st_mtime_ns, hash_of([open(scratch + '/x', 'rb').read()])); shutil.copyfile(root + '/f05.bin', scratch + '/y')",
    "flags": "for f in (os.O_NOFOLLOW, os.O_DIRECT, os.O_NOATIME, os.O_PATH, os.O_DIRECTORY, os.O_NONBLOCK):\n  for n in ('/f05.bin', '/link'):\n    try: d = os.open(root + n, os.O_RDONLY | f); print(f, n, fcntl.fcntl(d, fcntl.F_GETFL) & ~os.O_NOFOLLOW, os.fstat(d).st_ino)\n    except OSError as e: print(f, n, e.errno)",
    "numpy": "np.save(scratch + '/a.npy', 1); a = np.load(root + '/../more/a.npy', mmap_mode='r'); print(a.sum(), np.load(root + '/../more/a.npy')[3], np.fromfile(root + '/f09.bin', np.uint8).sum(), np.fromfile(root + '/f09.bin', np.uint8, 50, offset=9))",
    "threads": "from concurrent.futures import ThreadPoolExecutor as T; print(hash_of(T(4).map(lambda p: open(p, 'rb').read(), paths * 20)))",
    "surrogates": "print([open(e.path, 'rb').read() for e in os.scandir(root + '/deep') if e.is_file()])",
}  # fmt: skip

PRELUDE = """
import fcntl, glob, hashlib, json, mmap, os, shutil, sys
root, scratch = sys.argv[1:3]
paths = sorted(glob.glob(root + '/*.bin'))
def hash_of(parts):
    h = hashlib.sha256()
    for p in parts: h.update(bytes(p))
    return h.hexdigest()
"""
EACH = """
import numpy as np
for name, program in json.loads(sys.argv[3]).items():
    os.chdir('/')
    print('--', name, flush=True)
    exec(program)
"""


@pytest.fixture
def beside(files):
    """What some of the programs need beside the data."""
    import numpy as np

    (files.parent / "script.sh").write_text("echo sourced\n")
    (files.parent / "more").mkdir(exist_ok=True)
    np.save(files.parent / "more" / "a.npy", np.arange(1000, dtype=np.int32))
    return files


def _both(plane, command, tmp_path, **options):
    scratch = tmp_path / "scratch"
    outcomes = []
    for one in (run, plane.run):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        outcomes.append(one(command, **options))
    return outcomes


@pytest.mark.parametrize("immutable", [False, True])
@pytest.mark.parametrize("name", [*COMMANDS, *LOOKS])
def test_commands_do_the_same_and_are_served(beside, plane, tmp_path, name, immutable):
    served = plane(beside, immutable=immutable)
    text = (COMMANDS | LOOKS)[name].format(root=beside, scratch=tmp_path / "scratch")
    if immutable and name == "stat":
        text = text.replace("stat", "stat -c '%n %s %b %B %i %Y %Z %h %a %u %g'", 2)
    plain, ours = _both(served, ["bash", "-c", text], tmp_path)
    assert plain == ours
    assert served.counts["attached"] >= 1
    assert served.counts["refused"] == 0
    if name in COMMANDS:
        assert served.counts["copy"] >= 1


@pytest.mark.parametrize("immutable", [False, True])
def test_python_does_the_same_and_is_served(beside, plane, tmp_path, immutable):
    """One process for all of them: starting Python is what takes its time."""
    served = plane(beside, immutable=immutable)
    arguments = [str(beside), str(tmp_path / "scratch"), json.dumps(PYTHON)]
    command = [sys.executable, "-c", PRELUDE + EACH, *arguments]
    plain, ours = _both(served, command, tmp_path)
    assert plain[0] == 0, plain[2].decode()
    for actual, expected in zip(ours[1].split(b"--"), plain[1].split(b"--"), strict=True):
        assert actual == expected
    assert plain == ours
    assert served.counts["refused"] == 0
    assert served.counts["copy"] >= 100
    assert (served.counts["stat"] > 0) == immutable


def test_copies_of_a_tier_are_served_as_those_in_memory(beside, plane, tmp_path):
    tier = tmp_path / "tier"
    tier.mkdir()
    served = plane(beside, tier=tier)
    command = ["bash", "-c", f"cat {beside}/f*.bin; stat -c '%i %Y' {beside}/f05.bin"]
    assert run(command) == served.run(command)
    assert served.counts["tier_copy"] == 12


def test_a_root_may_be_spelled_through_a_link(beside, plane, tmp_path):
    link = tmp_path / "by-link"
    os.symlink(beside, link)
    served = plane(link)
    command = ["cat", f"{link}/f03.bin", f"{beside}/f04.bin"]
    assert run(command) == served.run(command)
    assert served.counts["copy"] == 2


def test_git_works(beside, plane, tmp_path):
    """It opens with O_NOATIME, maps, and compares what stat says with what it keeps."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    served = plane(beside)
    repository = tmp_path / "scratch"
    text = (
        f"cd {repository} && git init -q . && cp -a {beside} d && git add -A && git -c user.name=a "
        "-c user.email=b commit -qm x --date 2000-01-01T00:00:00Z && git status --porcelain && "
        f"git ls-tree -r HEAD && git hash-object {beside}/*.bin"
    )
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    plain, ours = _both(
        served, ["env", "GIT_CONFIG_GLOBAL=/dev/null", "bash", "-c", text], tmp_path
    )
    assert plain == ours, environment
    assert plain[0] == 0
    assert served.counts["copy"] >= 1


LIBRARIES = {
    "PIL": "from PIL import Image; print([hash_of([Image.open(root + n).tobytes()]) for n in ('/a.png', '/b.jpg')])",
    "h5py": "import h5py; f = h5py.File(root + '/c.h5', 'r'); print(f['x'][3:7].tolist(), f['y'][()].sum())",
    "pyarrow": "import pyarrow.parquet as q; print(q.read_table(root + '/d.parquet').to_pydict()['a'][:5], q.ParquetFile(root + '/d.parquet', memory_map=True).read().num_rows)",
    "torch": "import torch; print(torch.load(root + '/e.pt')['w'].sum(), torch.load(root + '/e.pt', mmap=True)['w'][3])",
    "zipfile": "import numpy as np; print(np.load(root + '/z.npz')['a'].sum())",
}  # fmt: skip


@pytest.fixture(scope="session")
def formats(tmp_path_factory):
    """A file of each format that libraries open in their own ways."""
    import h5py
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from PIL import Image

    root = tmp_path_factory.mktemp("formats") / "data"
    root.mkdir()
    pixels = np.random.default_rng(1).integers(0, 255, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(root / "a.png")
    Image.fromarray(pixels).save(root / "b.jpg")
    with h5py.File(root / "c.h5", "w") as f:
        f["x"] = np.arange(5000)
        f.create_dataset("y", data=np.arange(5000), compression="gzip")
    pq.write_table(pa.table({"a": list(range(5000))}), root / "d.parquet")
    torch.save({"w": torch.arange(3000)}, root / "e.pt")
    np.savez(root / "z.npz", a=np.arange(999))
    return root


def test_libraries_do_the_same_and_are_served(formats, plane, tmp_path):
    served = plane(formats)
    command = [
        sys.executable, "-c", PRELUDE + EACH, str(formats), "", json.dumps(LIBRARIES),
    ]  # fmt: skip
    plain, ours = _both(served, command, tmp_path)
    assert plain[0] == 0, plain[2].decode()
    assert plain == ours
    opened = {r[0] for r in served.ring.take(0).tolist() if r[2] == served.ring.COPY}
    assert opened == set(range(len(served.paths)))
    assert served.counts["refused"] == 0


# Python's tracker of semaphores, a process of its own, may be told too late that torch's are gone, and says so.
LOADER = """
import os, sys, torch, pathlib, hashlib
os.environ['PYTHONWARNINGS'] = 'ignore::UserWarning:multiprocessing.resource_tracker'
from torch.utils.data import DataLoader, Dataset
class Files(Dataset):
    def __init__(self, root): self.paths = sorted(pathlib.Path(root).glob('*.bin'))
    def __len__(self): return len(self.paths)
    def __getitem__(self, i): return hashlib.sha256(self.paths[i].read_bytes()).hexdigest()
if __name__ == '__main__':
    torch.manual_seed(3)
    for batch in DataLoader(Files(sys.argv[1]), 4, shuffle=True, num_workers=2,
                            multiprocessing_context=sys.argv[2]):
        print(batch)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_dataloader_are_served(files, plane, tmp_path, method):
    program = tmp_path / "loader.py"
    program.write_text(LOADER)
    served = plane(files)
    command = [sys.executable, str(program), str(files), method]
    plain = run(command)
    assert plain[0] == 0, plain[2]
    assert plain == served.run(command)
    workers = {int(r[1]) for r in served.ring.take(0) if r[2] == served.ring.COPY}
    assert len(workers) == 2
    assert served.counts["copy"] == 12


PROCESSES = """
import os, subprocess, sys
root = sys.argv[1]
def show(*a): print(*a, flush=True)
show(open(root + '/f01.bin', 'rb').read(5))
f = os.open(root + '/f02.bin', os.O_RDONLY)
pid = os.fork()
if pid == 0:
    show(os.read(f, 4), open(root + '/f03.bin', 'rb').read(5), tuple(os.fstat(f)))
    os._exit(0)
os.waitpid(pid, 0)
show(os.read(f, 4))
show(subprocess.run(['cat', root + '/f04.bin'], capture_output=True, close_fds=True).stdout[:9])
show(subprocess.run(['cat'], stdin=open(root + '/f05.bin'), capture_output=True).stdout[:9])
show(subprocess.run('cat ' + root + '/f06.bin', shell=True, capture_output=True).stdout[:9])
show(os.popen('cksum ' + root + '/f07.bin').read())
os.closerange(3, 200)
show(open(root + '/f08.bin', 'rb').read(5))
os.set_inheritable(g := os.open(root + '/f09.bin', os.O_RDONLY), True)
os.execvp('bash', ['bash', '-c', f'cat <&{g} | cksum; cat {root}/f10.bin | cksum'])
"""


def test_forks_children_and_what_they_inherit_are_served(files, plane):
    served = plane(files)
    command = [sys.executable, "-c", PROCESSES, str(files)]
    plain = run(command)
    assert plain[0] == 0, plain[2]
    assert plain == served.run(command)
    assert served.counts["copy"] == 10
    assert served.counts["blind"] == 0


SEES = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int c, char** v) {
  char b[64]; struct stat s; struct statx x;
  FILE* f = fopen(v[1], "re"); printf("%zu\\n", fread(b, 1, 50, f));
  f = freopen(v[2], "rb", f); printf("%zu %d\\n", fread(b, 1, 50, f), b[3]);
  f = fopen64(v[1], "rm"); printf("%d\\n", fgetc(f)); fseek(f, -1, SEEK_END); printf("%d\\n", fgetc(f));
  printf("%d\\n", freopen("/nowhere", "r", f) == NULL);
  printf("%d\\n", fopen(v[1], "x") == NULL);
  int d = open64(v[2], O_RDONLY); printf("%zd %d\\n", pread(d, b, 9, 100), b[8]);
  statx(d, "", AT_EMPTY_PATH, STATX_ALL, &x); printf("%llu %lld %u\\n", x.stx_ino, x.stx_mtime.tv_sec, x.stx_nlink);
  statx(AT_FDCWD, v[2], 0, STATX_BASIC_STATS, &x); printf("%llu %u:%u\\n", x.stx_size, x.stx_dev_major, x.stx_dev_minor);
  fstatat(d, "", &s, AT_EMPTY_PATH); printf("%lu %ld\\n", s.st_ino, s.st_mtim.tv_nsec);
  printf("%d %d %d\\n", access(v[1], R_OK), faccessat(AT_FDCWD, v[1], W_OK, AT_EACCESS), access("/none", F_OK));
  printf("%d\\n", open(NULL, O_RDONLY));
  return 0;
}
"""


@pytest.mark.parametrize("immutable", [False, True])
def test_streams_and_looks_of_a_c_program_are_the_same(files, plane, tmp_path, immutable):
    program = tmp_path / "sees"
    (tmp_path / "sees.c").write_text(SEES)
    command = ["gcc", "-w", "-O2", "-D_FORTIFY_SOURCE=2", "-o", program, tmp_path / "sees.c"]
    subprocess.run(command, check=True)
    served = plane(files, immutable=immutable)
    command = [str(program), str(files / "f04.bin"), str(files / "f05.bin")]
    plain = run(command)
    assert plain[0] == 0, plain
    assert plain == served.run(command)
    assert served.counts["copy"] == 4
