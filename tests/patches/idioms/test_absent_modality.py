"""Calls of towers below a condition: forms that upstream writes, and near misses with their reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.idioms.applied import spliced
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.absent_modality import find as idiom
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

HEAD = """
class Model:
    def get_image_features(self, pixel_values, image_grid_thw=None, vision_feature_layer=None, **kwargs):
        found = self.sight(pixel_values, grid=image_grid_thw, dtype=self.config.dtype)
        return self._project(found, image_grid_thw.prod(-1) // self.sight.merge**2)

    def _project(self, found, sizes):
        return self.projector(found)

    def get_video_features(self, pixel_values_videos, video_grid_thw=None, **kwargs):
        return self.get_image_features(pixel_values_videos, video_grid_thw, **kwargs)

    def forward(self, input_ids, inputs_embeds=None, pixel_values=None, image_grid_thw=None, given=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
"""
TAIL = """
        return self.language_model(inputs_embeds)
"""
FORMS = {
    "an attribute of the call": (
        """
        if pixel_values is not None:
            x = self.get_image_features(pixel_values, image_grid_thw, return_dict=True, **kwargs).pooler_output
            inputs_embeds = inputs_embeds + x
""",
        ("pixel_values is None", "(pixel_values, image_grid_thw, return_dict=True)", '("pooler_output",)'),
    ),
    "a name": (
        """
        if pixel_values is not None and input_ids is not None:
            x = self.get_image_features(pixel_values=pixel_values, image_grid_thw=image_grid_thw)
            inputs_embeds = inputs_embeds + x.pooler_output + x.deepstack
""",
        (
            "not (pixel_values is not None and input_ids is not None)",
            "(pixel_values=pixel_values, image_grid_thw=image_grid_thw)",
            '("pooler_output", "deepstack")',
        ),
    ),
    "a dictionary of results": (
        """
        if given.get("image") is None and pixel_values is not None and self.config.token is not None:
            given["image"]: Any = self.get_image_features(pixel_values, image_grid_thw)
        if given.get("image") is not None:
            inputs_embeds = inputs_embeds + given["image"].pooler_output
""",
        (
            "pixel_values is None and given.get('image') is None and self.config.token is not None",
            "(pixel_values, image_grid_thw)",
            '("pooler_output",)',
        ),
    ),
    "the result itself": (
        """
        if pixel_values is not None and pixel_values.size(0) > 0:
            x = self.get_video_features(pixel_values, image_grid_thw)
            inputs_embeds = inputs_embeds + x
""",
        (
            "not (pixel_values is not None and pixel_values.size(0) > 0)",
            "(pixel_values, image_grid_thw)",
            "()",
        ),
    ),
    "an option": (
        """
        if pixel_values is not None:
            x = self.get_image_features(pixel_values, image_grid_thw, vision_feature_layer=input_ids[0])
            inputs_embeds = inputs_embeds + x
""",
        ("pixel_values is None", "(pixel_values, image_grid_thw, vision_feature_layer=input_ids[0])", "()"),
    ),
}
CALL = "x = self.get_image_features(pixel_values, image_grid_thw)"
MISSED = {
    "an else": (
        f"if pixel_values is not None:\n    {CALL}\nelse:\n    x = None",
        "its condition has an else",
    ),
    "two conditions": (
        f"if input_ids is not None:\n    if pixel_values is not None:\n        {CALL}",
        "several",
    ),
    "not about data": (
        f"if pixel_values is not None and inputs_embeds.shape[1] != 1:\n    {CALL}",
        "not about data alone: inputs_embeds.shape",
    ),
    "other data": (f"if input_ids is not None:\n    {CALL}", "does not ask whether its data is None"),
    "computed": (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values[:1], image_grid_thw)",
        "pixel_values is computed from data",
    ),
    "unknown": (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values, image_grid_thw, sizes=3)",
        "what its argument sizes is without data is not known",
    ),
    "unpacked": (
        "if pixel_values is not None:\n    a, b = self.get_image_features(pixel_values, image_grid_thw)",
        "what becomes of its result",
    ),
    "no method": (
        "if pixel_values is not None:\n    x = self.get_audio_features(pixel_values, image_grid_thw)",
        "is not a method of a class of the file",
    ),
}


def found(source: str) -> list[Site]:
    return list(idiom.find(ModuleView(Document(source))))


def indented(text: str) -> str:
    return "".join(f"        {line}\n" for line in text.splitlines())


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    body, (condition, call, outputs) = FORMS[form]
    source = HEAD + body + TAIL
    (site,) = found(source)
    assert site.status is Status.ROUTED, site.reason
    assert site.variant == "patches_by_grid"
    assert site.captures["towers"] == "sight, projector"
    text = spliced(source, [site])
    assert f"        if {condition}:\n            inputs_embeds = veomni_absent.plus_zero(" in text
    assert f"features{call}".replace(" ", "") in "".join(text.split()).replace(",)", ")")
    assert f"outputs={outputs}," in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("form", MISSED)
def test_near_misses(form: str) -> None:
    body, reason = MISSED[form]
    (site,) = found(HEAD + indented(body) + TAIL)
    assert site.status is Status.MISSED
    assert reason in site.reason


def test_embeddings_must_exist_before() -> None:
    head = HEAD.replace("inputs_embeds = self.embed(input_ids)", "pass")
    (site,) = found(head + FORMS["a name"][0] + TAIL)
    assert "inputs_embeds is not computed before it" in site.reason


def test_patches_of_a_feature_must_be_known() -> None:
    (site,) = found(HEAD.replace(" // self.sight.merge**2", "") + FORMS["a name"][0] + TAIL)
    assert "how many patches become one feature" in site.reason


def test_images_in_groups_are_not_routed() -> None:
    head = HEAD.replace(
        "        found = ", "        pixel_values = pixel_values.flatten(0, 1)\n        found = "
    )
    body = (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values)\n    inputs_embeds += x"
    )
    assert "come in groups" in found(head + indented(body) + TAIL)[0].reason
    (site,) = found(HEAD + indented(body) + TAIL)
    assert (site.status, site.variant) == (Status.ROUTED, "images")


def test_a_call_without_a_condition_is_no_candidate() -> None:
    assert not found(HEAD + indented(CALL) + TAIL)


@pytest.mark.parametrize(("pixels", "asked"), [(None, 1), ("pixels", 0)])
def test_the_patched_code_asks_only_without_data(pixels: Any, asked: int) -> None:
    source = HEAD + FORMS["a dictionary of results"][0] + TAIL
    seen: list[Any] = []

    def plus_zero(module: Any, embeds: Any, call: Any, *, data: Any, towers: Any, outputs: Any) -> Any:
        seen.append((call("zeros", "grid"), data, towers, outputs))
        return embeds

    scope: dict[str, Any] = {"Any": Any, "veomni_absent": SimpleNamespace(plus_zero=plus_zero)}
    exec(spliced(source, found(source)), scope)
    model = scope["Model"]()
    model.config = SimpleNamespace(token=1, dtype=None)
    model.embed = model.language_model = lambda x: x
    model.get_image_features = lambda *given: SimpleNamespace(pooler_output=0, given=given)
    assert model.forward(5, pixel_values=pixels, image_grid_thw="sizes", given={}) == 5
    assert len(seen) == asked
    if asked:
        ((result, *told),) = seen
        assert result.given == ("zeros", "grid")
        assert told == [("pixel_values", "image_grid_thw"), ("sight", "projector"), ("pooler_output",)]
    seen.clear()
    model.forward(5, given={"image": SimpleNamespace(pooler_output=1)})
    assert not seen
