"""Calls of towers below a condition: forms that upstream writes, and near misses with their reasons."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.idioms.applied import sites_of, spliced
from veomni_hook.patches.idioms.absent_modality import find as idiom
from veomni_hook.patches.site import Status

HEAD = """
class Model:
    def get_image_features(
        self,
        pixel_values,
        image_grid_thw=None,
        vision_feature_layer=None,
        mask=None,
        needed=None,
        more=None,
        unread=None,
        pixel_attention_mask=None,
        **kwargs,
    ):
        if mask is None:
            mask = 1
        if needed is None:
            raise ValueError(pixel_attention_mask)
        other = self.sight(more) if more is not None else None
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
    "an attribute of the call": ("""
        if pixel_values is not None:
            x = self.get_image_features(pixel_values, image_grid_thw, return_dict=True, **kwargs).pooler_output
            inputs_embeds = inputs_embeds + x
""", ("pixel_values is None", "(pixel_values, image_grid_thw, return_dict=True)", '("pooler_output",)')),
    "a name": ("""
        if pixel_values is not None and input_ids is not None:
            x = self.get_image_features(pixel_values=pixel_values, image_grid_thw=image_grid_thw)
            inputs_embeds = inputs_embeds + x.pooler_output + x.deepstack
""", ("not (pixel_values is not None and input_ids is not None)", "(pixel_values=pixel_values, image_grid_thw=image_grid_thw)", '("pooler_output", "deepstack")')),
    "a dictionary of results": ("""
        if given.get("image") is None and pixel_values is not None and self.config.token is not None:
            given["image"]: Any = self.get_image_features(pixel_values, image_grid_thw)
        if given.get("image") is not None:
            inputs_embeds = inputs_embeds + given["image"].pooler_output
""", ("pixel_values is None and given.get('image') is None and self.config.token is not None", "(pixel_values, image_grid_thw)", '("pooler_output",)')),
    "a dictionary whose result gets other names": ("""
        if pixel_values is not None:
            first = self.get_image_features(pixel_values, image_grid_thw)
            given["image"] = first
        kept = given["image"]
        inputs_embeds = inputs_embeds + kept.pooler_output + kept.last_hidden_state.shape[1]
""", ("pixel_values is None", "(pixel_values, image_grid_thw)", '("pooler_output",)')),
    "another name that is bound again": ("""
        if pixel_values is not None:
            x = self.get_image_features(pixel_values, image_grid_thw)
            outputs = x
            inputs_embeds = inputs_embeds + x.pooler_output
        outputs = self.language_model(inputs_embeds)
        inputs_embeds = outputs.hidden_states
""", ("pixel_values is None", "(pixel_values, image_grid_thw)", '("pooler_output",)')),
    "arguments that may be absent": ("""
        if pixel_values is not None and inputs_embeds.shape[1] != 1:
            x = self.get_image_features(pixel_values.to(int), image_grid_thw, mask=given, unread=given[0])
            inputs_embeds = inputs_embeds + x
""", ("pixel_values is None and inputs_embeds.shape[1] != 1", "(pixel_values.to(int), image_grid_thw, mask=None, unread=None)", "()")),
    "features or data": ("""
        if given.get("image") or pixel_values is not None:
            if given.get("image") is None:
                given["image"] = self.get_image_features(pixel_values, image_grid_thw)
            inputs_embeds = inputs_embeds + given["image"].pooler_output
""", ("not (given.get('image') or pixel_values is not None)", "(pixel_values, image_grid_thw)", '("pooler_output",)')),
    "the result itself": ("""
        if pixel_values is not None and pixel_values.size(0) > 0:
            x = self.get_video_features(pixel_values, image_grid_thw)
            inputs_embeds = inputs_embeds + x
""", ("not (pixel_values is not None and pixel_values.size(0) > 0)", "(pixel_values, image_grid_thw)", "()")),
    "a chain": ("""
        if pixel_values is not None and given is not None:
            raise ValueError("both")
        elif pixel_values is not None:
            given = self.get_image_features(pixel_values, image_grid_thw)
        elif given is not None:
            given = given.to(1)
        if given is not None:
            inputs_embeds = inputs_embeds + given
""", ("pixel_values is None", "(pixel_values, image_grid_thw)", "()")),
}  # fmt: skip
CALL = "x = self.get_image_features(pixel_values, image_grid_thw)"
MISSED = {
    "a condition that binds a name": (
        "if (y := pixel_values) is not None and pixel_values is not None:\n"
        "    x = self.get_image_features(pixel_values)\n"
        "    inputs_embeds = inputs_embeds + x",
        "its condition binds y",
    ),
    "an else": (f"if pixel_values is not None:\n    {CALL}\nelse:\n    x = self.embed(0)", "its condition has an else that calls"),
    "two conditions": (f"if video_grid_thw is not None:\n    if pixel_values is not None:\n        {CALL}", "several"),
    "not about data": (f"if pixel_values is not None and input_ids.shape[1] != 1:\n    {CALL}", "not about data alone: input_ids.shape"),
    "other data": (f"if input_ids is not None:\n    {CALL}", "does not ask whether its data is None"),
    "always": (f"if given.get(1) is None:\n    {CALL}", "every batch calls it, unless features are given"),
    "a form": (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values, pixel_attention_mask=given)",
        "the form of its data is not known: pixel_values, pixel_attention_mask",
    ),
    "asked and raised": (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values, needed=given)",
        "what its argument needed is without data is not known",
    ),
    "computed": ("if pixel_values is not None:\n    x = self.get_image_features(pixel_values[:1], image_grid_thw)", "pixel_values is computed from data"),
    "unknown": (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values, image_grid_thw, sizes=3)",
        "what its argument sizes is without data is not known",
    ),
    "unpacked": ("if pixel_values is not None:\n    a, b = self.get_image_features(pixel_values, image_grid_thw)", "what becomes of its result"),
    "no method": ("if pixel_values is not None:\n    x = self.get_audio_features(pixel_values, image_grid_thw)", "is not a method of a class of the file"),
}  # fmt: skip


def indented(text):
    return "".join(f"        {line}\n" for line in text.splitlines())


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    body, (condition, call, outputs) = FORMS[form]
    source = HEAD + body + TAIL
    (site,) = sites_of(idiom, source)
    assert site.status is Status.ROUTED, site.reason
    assert site.variant == "patches_by_grid"
    assert site.captures["towers"] == "sight, projector"
    text = spliced(source, [site])
    assert f"        if {condition}:\n            inputs_embeds = veomni_absent.plus_zero(" in text
    assert f"features{call}".replace(" ", "") in "".join(text.split()).replace(",)", ")")
    assert f"outputs={outputs}," in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("form", MISSED)
def test_near_misses(form):
    body, reason = MISSED[form]
    (site,) = sites_of(idiom, HEAD + indented(body) + TAIL)
    assert site.status is Status.MISSED
    assert reason in site.reason


def test_patches_of_a_feature_must_be_known():
    (site,) = sites_of(idiom, HEAD.replace(" // self.sight.merge**2", "") + FORMS["a name"][0] + TAIL)
    assert "how many patches become one feature" in site.reason


FLATTENED = "        pixel_values = pixel_values.flatten(0, 1)\n"


def test_images_in_groups():
    head = HEAD.replace("        found = ", f"{FLATTENED}        found = ")
    body = (
        "if pixel_values is not None:\n    x = self.get_image_features(pixel_values)\n    inputs_embeds += x"
    )
    (site,) = sites_of(idiom, head + indented(body) + TAIL)
    assert (site.status, site.variant) == (Status.ROUTED, "images_in_groups")
    assert '            layout="groups",\n' in spliced(head + indented(body) + TAIL, [site])
    (site,) = sites_of(idiom, HEAD + indented(body) + TAIL)
    assert (site.status, site.variant) == (Status.ROUTED, "images")
    assert "layout" not in spliced(HEAD + indented(body) + TAIL, [site])


def test_frames_of_patches_with_positions():
    head = HEAD.replace("image_grid_thw", "image_position_ids")
    body = indented(
        "if pixel_values is not None:\n"
        "    x = self.get_image_features(pixel_values, image_position_ids)\n    inputs_embeds += x"
    )
    in_groups = head.replace("        found = ", f"{FLATTENED}        found = ")
    for source, layout in ((head, False), (in_groups, True)):
        (site,) = sites_of(idiom, source + body + TAIL)
        assert (site.status, site.variant) == (Status.ROUTED, "patches_with_positions")
        assert ('layout="groups"' in spliced(source + body + TAIL, [site])) is layout


def test_a_place_inside_another_condition_and_embeddings_of_another_name():
    body = """
if encoded is None:
    states = self.embed(input_ids)
    if pixel_values is not None:
        x = self.get_image_features(pixel_values, image_grid_thw)
        states = states.masked_scatter(0, x)
"""
    source = HEAD.replace("given=None", "encoded=None") + indented(body) + TAIL
    (site,) = sites_of(idiom, source)
    assert site.status is Status.ROUTED, site.reason
    text = spliced(source, [site])
    assert "            if pixel_values is None:\n                states = veomni_absent.plus_zero(" in text
    (site,) = sites_of(idiom, source.replace("states = self.embed(input_ids)", "pass"))
    assert "states is not computed before it" in site.reason


IMAGES = """
if given.get("image") is None and pixel_values is not None:
    given["image"] = self.get_image_features(pixel_values, image_grid_thw)
"""
VIDEOS = """
if given.get("video") is None and films is not None and inputs_embeds.shape[1] != 1:
    given["video"] = self.get_video_features(films, film_sizes)
"""
FILMS = HEAD.replace("given=None", "given=None, films=None, film_sizes=None").replace(
    "    def forward(",
    """    def get_audio_features(self, input_features, input_features_mask):
        return self.ear(input_features, input_features_mask)

    def forward(""",
)


WITHOUT_FEATURES = VIDEOS.replace('given.get("video") is None and ', "")
PLACES = {
    "images first": (IMAGES + VIDEOS, ["((films is not None or given.get('video') is None) and inputs_embeds.shape[1] != 1,)", "(pixel_values is not None,)"]),
    "always": (IMAGES + WITHOUT_FEATURES.partition(" and inputs")[0] + ":" + WITHOUT_FEATURES.partition(":")[2], ["(True,)", "(pixel_values is not None,)"]),
    "a later condition that reads what is not bound yet": (IMAGES + "late = {}" + VIDEOS.replace("given", "late"), ["", "(pixel_values is not None,)"]),
    "only one of them runs": ("if input_ids is None:" + indented(IMAGES) + "else:" + indented(VIDEOS), ["", ""]),
    "other towers": (IMAGES + VIDEOS.replace("get_video_features", "get_audio_features"), ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize("form", PLACES)
def test_another_place_that_calls_the_tower(form):
    body, conditions = PLACES[form]
    source = FILMS + indented(body) + TAIL
    sites = sites_of(idiom, source)
    assert [each.status for each in sites] == [Status.ROUTED] * 2, [each.reason for each in sites]
    for part, condition in zip(spliced(source, sites).split("plus_zero(")[1:], conditions, strict=True):
        given = " ".join(part.partition(".language_model(")[0].split())
        assert (
            f"elsewhere={condition}" in given.replace("( ", "(").replace(", )", ",)")
            if condition
            else ("elsewhere" not in given)
        )


def test_names_of_the_method_and_of_the_call():
    body = """
if video is not None:
    x = self.get_audio_features(video, ~mask)
    inputs_embeds = inputs_embeds + x
"""
    method = """
    def get_audio_features(self, input_features, input_features_mask):
        return self.ear(input_features, input_features_mask)
"""
    source = HEAD.replace("given=None", "video=None, mask=None") + indented(body) + TAIL + method
    (site,) = sites_of(idiom, source)
    assert site.variant == "spectra", site.reason
    text = "".join(spliced(source, [site]).split())
    assert "lambdavideo,mask:self.get_audio_features(video,mask.logical_not())" in text
    assert 'data=("input_features","input_features_mask"),' in text


def test_a_method_that_may_call_the_tower_too_leaves_the_forward_alone():
    (form, _), method = (
        FORMS["a name"],
        "\n    def _part(self, videos):\n        return self.get_video_features(videos)\n",
    )
    assert sites_of(idiom, HEAD + form + TAIL + method)[0].status is Status.ROUTED
    part, own = sites_of(idiom, HEAD + form + "        x = self._part(given)\n" + TAIL + method)
    assert (part.status, part.target, part.reason) == (
        Status.MISSED,
        "Model._part",
        "forward calls _part, which calls it",
    )
    assert own.status is Status.MISSED and own.reason.startswith("_part may call its tower, too")


def test_a_call_without_a_condition_is_no_candidate():
    assert not sites_of(idiom, HEAD + indented(CALL) + TAIL)


@pytest.mark.parametrize(("pixels", "asked"), [(None, 1), ("pixels", 0)])
def test_the_patched_code_asks_only_without_data(pixels, asked):
    source = HEAD + FORMS["a dictionary of results"][0] + TAIL
    seen: list[Any] = []

    def plus_zero(module: Any, embeds: Any, call: Any, *, data: Any, towers: Any, outputs: Any) -> Any:
        seen.append((call("zeros", "grid"), data, towers, outputs))
        return embeds

    scope: dict[str, Any] = {"Any": Any, "veomni_absent": SimpleNamespace(plus_zero=plus_zero)}
    exec(spliced(source, sites_of(idiom, source)), scope)
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
