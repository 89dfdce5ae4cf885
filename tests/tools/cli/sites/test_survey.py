from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.tools.cli.sites.survey_work import ends, fails_in_m2, joined
from veomni_hook.errors import VeomniHookError
from veomni_hook.tools.cli.sites.survey import FEW, survey

MANY = FEW + 5


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for number in range(MANY):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}\n")
    return {f"m{number}": str(tmp_path / f"m{number}.py") for number in range(MANY)}


def test_results_come_in_the_order_of_the_files(files: dict[str, str]) -> None:
    found = survey(partial(joined, sign=":"), files, "testing", jobs=2)
    assert [one[0] for one in found if not isinstance(one, VeomniHookError)] == [
        f"m{number}:x = {number}" for number in range(MANY)
    ]
    assert os.getpid() not in {one[1] for one in found if not isinstance(one, VeomniHookError)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_few_files_and_one_job_stay_in_this_process(files: dict[str, str], jobs: int) -> None:
    few = files if jobs == 1 else dict([*files.items()][:FEW])
    found = survey(partial(joined, sign=":"), few, "testing", jobs=jobs)
    assert {one[1] for one in found if not isinstance(one, VeomniHookError)} == {os.getpid()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_cannot_be_read_is_a_result(files: dict[str, str], jobs: int) -> None:
    os.unlink(files["m3"])
    Path(files["m4"]).write_bytes(b"# coding: klingon\n")
    Path(files["m5"]).write_bytes(b"x = '\xff'\n")
    found = dict(zip(files, survey(partial(joined, sign=":"), files, "testing", jobs=jobs), strict=True))
    failed = {name: one for name, one in found.items() if isinstance(one, VeomniHookError)}
    assert set(failed) == {"m3", "m4", "m5"}
    assert all(name in error.what and error.where == files[name] for name, error in failed.items())


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_the_work_raises_is_raised(files: dict[str, str], jobs: int) -> None:
    with pytest.raises(ValueError, match="m2 it was"):
        survey(fails_in_m2, files, "testing", jobs=jobs)


def test_a_worker_that_is_ended_from_outside(files: dict[str, str]) -> None:
    with pytest.raises(VeomniHookError, match="a worker process ended") as caught:
        survey(ends, files, "testing", jobs=2)
    assert "--jobs 1" in caught.value.fix
