"""Heads of other packages' trainers get our function without a setting, and stay as they are in another form."""

import pytest

KNOWN = """
def add_fused_lm_head(model):
    def forward(self, device):
        compact = _use_triton(device)
        return compact, _ChunkedLogProbFunction.apply(1, 2, 3)
    return forward
"""
OTHER = """
def add_fused_lm_head(model):
    return lambda self, device: Another.apply(1)
"""
CODE = """
import json, veomni_hook.install, trl.trainer, trl.trainer.utils as utils
import inspect, warnings
print(json.dumps(inspect.getsource(utils)))
"""


@pytest.mark.parametrize("text", [KNOWN, OTHER, "other = 1\n"], ids=["known", "another", "none"])
def test_trls_head(python, tmp_path, text):
    folder = tmp_path / "trl" / "trainer"
    folder.mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    (folder / "__init__.py").write_text("from trl.trainer import base_config\n", encoding="utf-8")
    (folder / "base_config.py").touch()
    (folder / "utils.py").write_text("import torch\n" + text, encoding="utf-8")
    ran = python(CODE, VEOMNI_PATCHES=None)
    assert not ran.err
    if text is KNOWN:
        assert "veomni_compacts(_use_triton, device)" in ran.result
        assert "veomni_log_probs(self, _ChunkedLogProbFunction, 1, 2, 3)" in ran.result
    else:
        assert ran.result == "import torch\n" + text
