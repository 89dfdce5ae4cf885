"""A full disk, an unusable cache: one warning a process that says what happens now and what to do; no folder stays."""

import tempfile
from pathlib import Path

import pytest

from tests.finders.conftest import HERE, HOOK, TINY, warnings_of

SHOW = f"from {TINY} import TinyNorm; print(TinyNorm().forward(1), flush=True)"
MORE = "import transformers.models.pair_a.modeling_pair_a, transformers.models.still.modeling_still\n"
RUN = f"{HOOK}{SHOW}\n{MORE}"
FULL = """
import errno, os
def full(*arguments): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""
TEMPORARY = "are kept in a temporary folder until this process ends, and every start patches them again"
MEMORY = "are patched in memory at each start"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spoil", "reason", "now"),
    [
        # Every write fails, wherever; as a quota or a full root partition.
        (f"{FULL}os.write = full\n", "No space left on device", MEMORY),
        (f"{FULL}os.fsync = full\n", "No space left on device", MEMORY),
        # The kernel itself refuses: files may not grow beyond 10 bytes.
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n", "File too large", MEMORY),
        # The cache's disk is full, that of temporary folders is not.
        (
            f"{FULL}import shutil, veomni_hook.cache.trusted_folder as trusted\nwrite = trusted.Root.write\n"
            "trusted.Root.write = lambda root, *a: full() if root.path.endswith('cache') else write(root, *a)\n",
            "No space left on device",
            TEMPORARY,
        ),
    ],
)  # fmt: skip
def test_a_full_disk_is_one_warning(python, tmp_path, spoil, reason, now):
    folder = tmp_path / "temporary"
    folder.mkdir()
    ran = python(spoil + RUN, flags=("-W", "always"), TMPDIR=str(folder))
    assert ran.out.strip() == "103", ran.err
    (said,) = warnings_of(ran.err)
    assert f"the cache of patched modules cannot be used: {tmp_path / 'cache'}" in said
    assert f"{reason}. Modules {now}, so imports are slower." in said
    assert "Fix: free space there" in said and "VEOMNI_CACHE_DIR" in said
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_and_holds_everything_is_no_problem(python, tmp_path):
    """As one that was filled when an image was built."""
    assert warnings_of(python(RUN).err) == []
    deny = "import os; os.access = lambda *a, **k: False\n"  # the superuser may write anywhere
    ran = python(deny + RUN + "print(veomni_hook.install.handle.status())", flags=("-W", "always"))
    assert f"{TINY}: patched (hit)" in ran.out
    assert warnings_of(ran.err) == []


FORKED = {
    "os.fork": "pid = os.fork()\nif not pid:\n    {show}\n    os._exit(0)\nos.waitpid(pid, 0)",
    "multiprocessing, fork": "import multiprocessing as mp, work\nmp.get_context('fork').Pool(1).map(work.work, [0])",
    "multiprocessing, forkserver": (
        "import multiprocessing as mp, work\nif __name__ == '__main__': mp.get_context('forkserver').Pool(1).map(work.work, [0])"
    ),
    "fork after the store was opened": (
        "import transformers.models.auto.modeling_auto\n"
        "pid = os.fork()\nif not pid:\n    {show}\n    os._exit(0)\nos.waitpid(pid, 0)"
    ),
}


@pytest.fixture
def short_folder():
    """A folder with a short path: forkserver puts a socket into the temporary one."""
    with tempfile.TemporaryDirectory(prefix="v") as folder:
        yield Path(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", FORKED)
def test_forked_workers_leave_no_folder_behind(python, tmp_path, short_folder, how):
    (tmp_path / "work.py").write_text(f"def work(_):\n    import veomni_hook.install\n    {SHOW}\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "keys").write_text("")  # found to be unusable when something is to be written
    ran = python(
        f"{HERE}{HOOK}import os\n" + FORKED[how].format(show=SHOW),
        TMPDIR=str(short_folder),
    )
    assert "103" in ran.out, ran.err
    assert [path.name for path in short_folder.iterdir() if path.name.startswith("veomni-hook-")] == []
