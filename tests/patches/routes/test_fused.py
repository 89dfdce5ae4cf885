"""Which methods can have a copy beside their class, where kernels replace several statements."""

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import FUSED, Edit, apply_edits
from veomni_hook.patches.routes.compose import method_at, with_copies

METHODS = {
    "a method": ("    def f(self, x=1, *, y: int = 2, **more):\n        return x\n", True),
    "a decorated one": ("    @torch.no_grad()\n    def f(self):\n        return 1\n", True),
    "super": ("    def f(self):\n        return super().f()\n", False),
    "a private name": ("    def f(self):\n        return self.__own\n", False),
    "a name of Python's": ("    def f(self):\n        return self.__dict__\n", True),
    "a default of the class": ("    def f(self, x=LIMIT):\n        return x\n", False),
    "a static method": ("    @staticmethod\n    def f(x):\n        return x\n", False),
    "defined twice": ("    def f(self):\n        return 1\n\n    def f(self):\n        return 2\n", False),
    "in a class in a class": ("    class D:\n        def f(self):\n            return 1\n", False),
    "a function inside": (
        "    def f(self):\n        def g():\n            return 1\n        return g\n",
        False,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_which_methods_mean_the_same_beside_their_class(name):
    text, can = METHODS[name]
    source = f"class C:\n    LIMIT = 3\n\n    def g(self):\n        pass\n\n{text}"
    method = method_at(Document(source), source.index("return"))
    assert (method is not None) == can


def test_a_copy_takes_everything_that_the_method_takes():
    source = (
        'class C:\n    def f(self, a, /, b=1, *rest, c, d=2, **more):\n        """Docs."""\n'
        "        return self, a, b, rest, c, d, more\n\n\nlast = 1\n"
    )
    at = source.index("        return")
    edits = [Edit(at, at, "        # here\n", 0, form=FUSED)]
    text = apply_edits(source, with_copies(Document(source), edits))
    assert text.startswith(source.partition("\n\n\nlast")[0]) and text.endswith("\n\n\nlast = 1\n")
    scope = {}
    exec(text, scope)
    expected = scope["C"]().f(1, 2, 3, c=4, e=5)
    assert scope["veomni_C_f"](expected[0], 1, 2, 3, c=4, e=5) == expected
    assert "# here" in text and text.count("Docs.") == 1
