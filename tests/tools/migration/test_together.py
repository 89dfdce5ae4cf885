"""A patch that applies alone, and calls, reads or gives what only another patch changes."""

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.tools.migration.together import needing, unfit

BASE = """
def look(image, mask):
    return stack(image, mask)

class Tower:
    def __init__(self):
        self.width = 4

    def features(self, images):
        out = self.layers(images)
        out.pooled = images
        return out

    def forward(self, images, **kwargs):
        return self.features(images).pooled

class Model:
    def __init__(self):
        self.tower = Tower()

    def forward(self, images):
        return self.tower(images)

    def places(self, ids, grid):
        return ids

class Talker:
    def forward(self, ids):
        return self.model.places(ids, None)

class Speech:
    talks = Talker
"""
#: Upstream asks for more.
NEWER = BASE.replace("def look(image, mask)", "def look(image, mask, ids)")
NEWER = NEWER.replace("self.features(images)", "self.features(images, self.width)")


def look(image):
    return image, image


def looks(self, images):
    return look(images)


def looks_as_upstream(self, images):
    return look(images, images, images)


def init(self):
    self.width = 4
    self.slices = []


def sliced(self, images, slices=None, **kwargs):
    return images


def passes_slices(self, images):
    return self.tower(images, slices=[])


def reads_slices(self, images):
    return self.slices


def features(self, images):
    return self.layers(images)


def features_as_upstream(self, images, width=None):
    given = self.layers(images)
    given.pooled = images + 0
    return given


def forward_of_tensors(self, images, **kwargs):
    return self.features(images)


@pytest.mark.parametrize(
    ("fitting", "lost", "why"),
    [
        ({"Model.forward": looks}, {"look": look}, "it needs the patch of look, which it calls with other"),
        ({"Model.forward": looks_as_upstream}, {"look": look}, "it needs the patch of look, whose result it takes"),
        ({"Model.forward": looks_as_upstream}, {}, ""),
        ({"Model.forward": passes_slices}, {"Tower.forward": sliced}, "which brings slices"),
        ({"Model.forward": passes_slices}, {"Model.places": sliced}, ""),
        ({"Tower.forward": reads_slices}, {"Tower.__init__": init}, "which brings slices"),
        ({"Model.forward": reads_slices}, {"Tower.__init__": init}, ""),
        ({"Tower.features": features}, {}, "Tower.forward calls it with other arguments"),
        ({"Tower.features": features_as_upstream}, {"Tower.forward": forward_of_tensors}, ""),
        ({"Tower.features": features, "Tower.forward": forward_of_tensors}, {}, ""),
    ],
)  # fmt: skip
def test_patches_that_belong_together(fitting, lost, why):
    found = found_in(fitting, lost)
    assert list(found) == ([0] if why else [])
    assert why in found.get(0, "")


def test_a_result_that_upstream_takes():
    base = Document(BASE, "m")
    fitting, lost = patches({"Tower.features": features}), patches({"Tower.forward": forward_of_tensors})
    found = needing(PatchConfig("m"), fitting, lost, base, base)
    assert found == {0: "it needs the patch of Tower.forward, which takes its result"}
    assert not needing(PatchConfig("m"), fitting, [], base, base)


def test_what_needs_a_patch_that_needs_another():
    fitting = {"Model.forward": passes_slices, "Tower.forward": sliced_by_places}
    found = found_in(fitting, {"Model.places": places})
    assert sorted(found) == [0, 1]


def test_what_is_left_out_because_it_calls_a_patch_in_another_way():
    """The code that uses it is left out with it; what works beside the patch stays."""
    base, fitting = Document(BASE, "m"), patches({"Model.places": places})
    assert needing(PatchConfig("m"), fitting, [], base, base) == {
        0: "Talker.forward calls it with other arguments"
    }
    config = PatchConfig("m", exclude=["look", "Speech", "Talker"])
    assert not needing(config, fitting, [], base, base)
    assert unfit(config, fitting, base) == ["Speech", "Talker"]
    assert not unfit(config, patches({"Model.places": places_as_upstream}), base)


def sliced_by_places(self, images, slices=None, **kwargs):
    return self.places(images)


def places(self, ids):
    return ids


def places_as_upstream(self, ids, grid):
    return ids + 0


def patches(replacements):
    return [
        Patch(PatchType.METHOD_OVERRIDE if "." in target else PatchType.FUNCTION_REPLACEMENT, target, new)
        for target, new in replacements.items()
    ]


def found_in(fitting, lost):
    return needing(
        PatchConfig("m"), patches(fitting), patches(lost), Document(NEWER, "m"), Document(BASE, "m")
    )
