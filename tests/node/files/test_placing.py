"""Placing: copies of far files are made, kept within quotas, shared and given back."""

import os

from node.conftest import serving, until
from node.files.conftest import bytes_of, content, copies_of, make_files, run_of, settle


def test_far_files_are_copied_once_and_shown_on_the_board(tmp_path, folder, program):
    paths = make_files(tmp_path / "data", 50)
    settle()
    with serving(folder) as server:
        one = program(tmp_path / "data", simulate="nfs")
        answer = one.ready()
        assert (answer.files, answer.complete) == (50, True)
        copies = copies_of(server)
        until(lambda: len(copies) == 50)
        run = run_of(server)
        for k, path in enumerate(paths):
            file = run.find(os.fsencode(path))
            assert file == k
            assert run.board.placed(file)
            assert bytes_of(copies.find(os.fsencode(path)), copies) == path.read_bytes()
        assert copies.figures.source_files == 50
        assert copies.figures.source_bytes == sum(p.stat().st_size for p in paths)
