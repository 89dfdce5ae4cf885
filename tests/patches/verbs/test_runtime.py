"""Questions to VeOmni's runtime in the code of a config, which go to this package."""

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.verbs.runtime import served

UPSTREAM = "slot = None\nclass M:\n    def forward(self, x, labels=None):\n        return x\n"
CONFIG = '''
    @config.override_method("M.forward")
    def forward(self, x, labels=None):
        """self.loss_function"""
        {}
        return x
'''
IMPORT = "from veomni_hook.integrations.veomni import unbound as veomni_unbound"


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (
            "loss, _, aux = self.loss_function(x, labels, weights=self.w)",
            "loss, _, aux = veomni_unbound.loss_of(self, 3)(x, labels, weights=self.w)",
        ),
        ("loss, x = self.loss_function(x)", "loss, x = veomni_unbound.loss_of(self, 2)(x)"),
        ("x = slot.bound_kernel() or x", "x = veomni_unbound.kernel_of(slot) or x"),
        ("x = not slot.use_eager_impl", "x = not veomni_unbound.is_eager(slot)"),
    ],
)
def test_a_question_goes_to_this_package(patched, asked, answered):
    result = patched(UPSTREAM, CONFIG.format(asked))
    assert f"        {answered}\n" in result.plain
    assert result.plain.count(IMPORT) == 1
    compile(result.text, "upstream", "exec")
    (added,) = [one for one in result.report.applied if one.kind == "additional_import"]
    assert added.reason == "What the config asks of the runtime that it was written for"


@pytest.mark.parametrize(
    "code",
    [
        "loss = self.loss_function(x, labels)",
        "loss, aux = self.own.loss_function(x)",
        "loss, aux = self.loss_function",
        "x = slot.bound_kernel(x)",
    ],
)
def test_other_code_stays(patched, code):
    result = patched(UPSTREAM, CONFIG.format(code))
    assert code in result.plain and IMPORT not in result.plain


def test_a_helper_and_a_class_may_ask(patched):
    helper = "def helper(slot):\n        return slot.bound_kernel()\n    config.add_helper(helper)\n"
    assert IMPORT in patched(UPSTREAM, f"\n    {helper}").plain
    owner = "@config.replace_class('M')\n    class M:\n        def forward(self, x, labels=None):\n"
    owner += "            a, b = self.loss_function(x)\n            return a\n"
    assert IMPORT in patched(UPSTREAM, f"\n    {owner}").plain


def test_text_without_questions_is_not_read(monkeypatch):
    document = Document("def f(x):\n    return x\n")
    assert served(document) is document.source
