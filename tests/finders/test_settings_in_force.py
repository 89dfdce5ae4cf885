"""Misspelt environment variables: one warning in a run; those of other projects are left alone."""

import pytest

from tests.finders.conftest import HOOK, SHOW, warnings_of
from veomni_hook.finders.settings_in_force import meant


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("VEOMNI_KERNEL", "VEOMNI_KERNELS"),
        ("VEOMNI_KERNLES", "VEOMNI_KERNELS"),
        ("VEOMNI_PATCH", "VEOMNI_PATCHES"),
        ("VEOMNI_HOK", "VEOMNI_HOOK"),
        ("VEOMNI_CACHEDIR", "VEOMNI_CACHE_DIR"),
        ("VEOMNI_REMOTECODE", "VEOMNI_REMOTE_CODE"),
        # VeOmni's own, as of August 2026
        *((f"VEOMNI_{name}", "") for name in (
            "USE_LIGER_KERNEL", "UPLOAD_CMD", "LORA_KEY", "ENABLE_CHUNK_LOSS", "CHECKPOINT_TEST_NPROC",
            "VERBOSITY", "DESTROY_NCCL_ON_EXIT", "USE_FUSED_KERNELS",
        )),
        ("VEOMNI_SOMETHING_ELSE", ""),
        ("VEOMNI_", ""),
    ],
)  # fmt: skip
def test_what_is_meant(variable, expected):
    assert meant(variable) == expected


def test_one_warning_in_a_run_names_the_nearest(python):
    code = f"{HOOK}{SHOW}\nimport veomni_hook\nwith veomni_hook.activate(): import transformers.models.pair_a.modeling_pair_a"
    ran = python(
        code, flags=("-W", "always"), VEOMNI_KERNEL="torch", VEOMNI_USE_LIGER_KERNEL="1", VEOMNI_HOK=""
    )
    assert ran.out.strip() == "103", ran.err
    (said,) = warnings_of(ran.err)
    assert "VEOMNI_KERNEL is not a variable of veomni-hook" in said and "set VEOMNI_KERNELS" in said


def test_under_strict_it_is_an_error(python):
    ran = python(HOOK + SHOW, VEOMNI_KERNEL="torch", VEOMNI_STRICT="1")
    assert ran.code == 1
    assert "SettingsError: VEOMNI_KERNEL is not a variable of veomni-hook" in ran.err
    assert "set VEOMNI_KERNELS, or unset VEOMNI_KERNEL" in ran.err
