"""TensorFlow's own file system under `headrace run`: a script that nobody changed is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, sys
import tensorflow as tf
root = sys.argv[1]
names = tf.io.gfile.glob(root + '/*.bin')
found = hashlib.sha256()
for epoch in range(3):
    data = tf.data.Dataset.from_tensor_slices(sorted(names)).map(tf.io.read_file, num_parallel_calls=2)
    for one in data:
        found.update(one.numpy())
    for record in tf.data.TFRecordDataset(root + '/x.tfrecord'):
        found.update(record.numpy())
print(found.hexdigest(), tf.io.gfile.stat(sorted(names)[3]).length)
"""


@pytest.fixture
def data(tmp_path):
    import tensorflow as tf

    root = tmp_path / "data"
    root.mkdir()
    for i in range(12):
        (root / f"{i:02}.bin").write_bytes(os.urandom(i * 997))
    with tf.io.TFRecordWriter(str(root / "x.tfrecord")) as f:
        for i in range(50):
            f.write(os.urandom(i * 31))
    return root


def test_a_script_that_nobody_changed_is_served_with_identical_results(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "rt"))
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(data)]
    ours = [sys.executable, "-c", "from headrace.cli import main; main()", "run", "--root", str(data),
            "--simulate", "nfs", "--report", str(report), "--"]  # fmt: skip
    plain = subprocess.run(command, capture_output=True, check=True, timeout=200)
    served = subprocess.run([*ours, *command], capture_output=True, check=True, timeout=200)
    assert served.stdout == plain.stdout
    opens = json.loads(report.read_text())["opens"]
    assert opens["copy"] > 12  # the first epoch may be before them
    assert opens["refused"] == 0
