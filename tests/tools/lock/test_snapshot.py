from __future__ import annotations

from veomni_hook.tools.lock import snapshot

from .conftest import NORM


def test_a_site_that_is_routed_where_it_is_called_has_the_code_that_it_uses() -> None:
    (site,) = snapshot("m", NORM.replace("class Norm", "class WholeNorm")).sites
    assert site.bodies == ("WholeNorm.forward", "double")


def test_decorators_belong_to_the_text() -> None:
    held = snapshot("m", NORM.replace("    def forward", "    @hub('x')\n    def forward"))
    assert held.bodies["Norm.forward"].text[:2] == ("@hub('x')", "def forward(self, x):")


def test_docstrings_are_left_out() -> None:
    text = NORM.replace(
        "        # a comment\n", '        """Words.\n\n        More.\n        """\n        # a comment\n'
    )
    assert snapshot("m", text).bodies["Norm.forward"].text == snapshot("m", NORM).bodies["Norm.forward"].text
    only = NORM.replace("    return 2 * x", '    """Nothing else."""')
    assert snapshot("m", only).bodies["double"].text == ("def double(x):", '    """Nothing else."""')
    one_line = NORM.replace("    return 2 * x", '    """Words."""; return 2 * x')
    assert snapshot("m", one_line).bodies["double"].text[1] == '    """Words."""; return 2 * x'


def test_known_definitions_are_recorded_as_far_as_they_are_there() -> None:
    first = snapshot("m", NORM)
    known = {name: body.fingerprint for name, body in first.bodies.items()}
    held = snapshot("m", NORM.replace("def double", "def twice").replace("scale", "weight"), known=known)
    assert set(held.bodies) == {"Norm.forward"} and held.renamed == {"double": "twice"}
