"""The story of a staged DDP job on a real Slurm: `cluster.story`."""

from __future__ import annotations

import pytest

from cluster.story import check_page, tell

pytest.importorskip("torch")
pytest.importorskip("PIL")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_story_of_a_job_on_slurm(slurm, launch, request):
    def hurry(job: str) -> None:
        slurm.wait_for_job(job, "PENDING")
        slurm.begin_now(job)

    log = tell("slurm", launch, slurm.kill_node, hurry)
    check_page("slurm", log, launch.folder, request.config)
