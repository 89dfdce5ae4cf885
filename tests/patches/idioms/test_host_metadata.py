"""What models compute from sizes: which code runs on the host, and where sizes are read."""

import textwrap

import pytest

from tests.patches.idioms.applied import changed, sites_of, spliced
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.idioms.host_metadata import find
from veomni_hook.patches.idioms.host_metadata.binding import names_of
from veomni_hook.patches.site import Status


def sites(text):
    return sites_of(find, textwrap.dedent(text), "lookalike")


def edited(text):
    return spliced(textwrap.dedent(text), sites(text))


def test_a_function_that_takes_precomputed_results_runs_on_the_host():
    text = """
    @cached
    def positions(sizes, merge, kwargs=None):
        if kwargs is not None and (found := kwargs.pop("position_ids", None)) is not None:
            return found
        return sizes.tolist()

    def of_kwargs_alone(kwargs):
        return kwargs.pop("a", None)

    def others(sizes, **kwargs):
        return kwargs.pop("a", None)
    """
    [site] = sites(text)
    assert (site.target, site.status, site.variant) == ("positions", Status.ROUTED, "computed_on_host")
    assert '@cached\n@veomni_host.computed("position_ids")\ndef positions(' in edited(text)


MODEL = """
class Model:
    def __init__(self, config):
        self.merge = config.vision_config.merge
        self.table = make(config)

    def get_rope_index(self, input_ids, image_grid_thw=None, attention_mask=None):
        return self.step(input_ids)

    def step(self, ids):
        return self.{attribute} * ids

    def forward(self, input_ids, image_grid_thw=None, attention_mask=None, position_ids=None, pixels=None):
        return input_ids
"""


def test_positions_run_on_the_host_and_a_forward_reads_sizes_at_once():
    found = {site.target: site for site in sites(MODEL.format(attribute="merge"))}
    assert found["Model.get_rope_index"].variant == "computed_on_host"
    assert found["Model.forward"].variant == "read_together"
    assert not found["Model.forward"].counted
    text = edited(MODEL.format(attribute="merge"))
    assert "    @veomni_host.computed(floats=True)\n    def get_rope_index(" in text
    call = text[text.index("veomni_host.read_together(") :].partition("return input_ids")[0]
    assert "".join(call.split()) == (
        "veomni_host.read_together((image_grid_thw,),(input_ids,attention_mask)ifposition_idsisNoneelse(position_ids,))"
    )


def test_positions_follow_from_what_the_call_is_given_by_whatever_names():
    text = MODEL.format(attribute="merge").replace(
        "pixels=None):\n        return input_ids",
        """tokens=None, pixels=None):
        return self.place(tokens, image_grid_thw)

    def place(self, tokens, image_grid_thw):
        return self.get_rope_index(tokens, image_grid_thw)""",
    )
    call = edited(text).partition("veomni_host.read_together(")[2].partition("return ")[0]
    assert "(input_ids,attention_mask,tokens)ifposition_ids" in "".join(call.split())


@pytest.mark.parametrize("attribute", ["table", "unknown"])
def test_positions_that_follow_from_the_models_state_stay(attribute):
    [site] = sites(MODEL.format(attribute=attribute))
    assert (site.target, site.status) == ("Model.get_rope_index", Status.MISSED)
    assert site.reason == f"it reads or changes self.{attribute}"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(sizes.prod(-1) // self.visual.merge_size**2).tolist()", "(veomni_host.values(sizes).prod(-1) //"),
        ("int(sizes[0, 0].item())", "int(veomni_host.values(sizes)[0, 0].item())"),
        ("sizes.tolist() if self.config.flag else None", "veomni_host.values(sizes).tolist() if"),
    ],
)
def test_sizes_are_read_from_the_copy(expression, expected):
    text = f"class M:\n    def get_image_features(self, pixels, sizes):\n        return {expression}\n"
    [site] = sites(text)
    assert (site.status, site.variant) == (Status.ROUTED, "read_once")
    assert expected in edited(text)


def test_sizes_that_upstream_sends_to_a_device_are_on_the_host_from_the_begin_on():
    expression = "(torch.as_tensor(sizes, device=pixels.device) // self.patch_size).prod(-1).tolist()"
    text = f"class M:\n    def get_image_features(self, pixels, sizes):\n        return {expression}\n"
    [site] = sites(text)
    assert (site.status, site.variant, site.captures) == (Status.ROUTED, "read_once", {"sizes": "sizes"})
    lines = edited(text).splitlines()
    assert lines[3].strip() == "sizes = veomni_host.values(sizes)"
    assert "torch.as_tensor(sizes, device=veomni_host.place(pixels.device)) //" in "".join(lines)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("counts = pixels.sum(-1)\n        return counts.tolist()", "what the method computes (counts)"),
        ("return (sizes * pixels).tolist()", "several arguments"),
        ("return (sizes * self.scale).tolist()", "a tensor of self"),
    ],
)
def test_other_values_stay_where_they_are(body, reason):
    [site] = sites(f"class M:\n    def get_image_features(self, pixels, sizes):\n        {body}\n")
    assert site.status is Status.MISSED
    assert reason in site.reason and "(line " in site.reason


def test_lengths_of_sounds_follow_from_a_mask():
    text = """
    def _get_feat_extract_output_lengths(lengths):
        return lengths // 2

    class M:
        def get_audio_features(self, features, feature_attention_mask):
            lengths = torch.sum(feature_attention_mask, dim=1)
            features = features[feature_attention_mask.bool()]
            out = _get_feat_extract_output_lengths(lengths)
            return features, out.tolist()
    """
    found = {site.target: site for site in sites(text)}
    assert found["_get_feat_extract_output_lengths"].variant == "lengths_followed"
    assert found["M.get_audio_features"].variant == "read_once"
    made = edited(text)
    assert "@veomni_host.lengths\ndef _get_feat_extract_output_lengths(" in made
    assert "veomni_host.followed(lambdafeature_attention_mask:torch.sum(" in "".join(made.split())
    assert "features[veomni_host.chosen(feature_attention_mask)]" in made
    assert "veomni_host.values(out).tolist()" in made


def test_whether_samples_share_a_row_is_asked_of_known_positions():
    text = """
def packed(position_ids):
    mask = (torch.diff(position_ids, dim=-1) != 1).cumsum(-1)
    return None if (mask[:, -1] == 0).all() else mask

def other(position_ids, rows):
    return (torch.diff(position_ids) != rows).all()

def compared(position_ids):
    return (position_ids == 0).all()

def changes(position_ids):
    return torch.diff(position_ids)
"""
    assert [site.target for site in sites(text)] == ["packed"]
    made = edited(text)
    assert made.count("@veomni_host") == 1
    assert "@veomni_host.computed(floats=True, known=True)\ndef packed(position_ids):" in made


def test_questions_about_padding_masks_are_asked_of_the_copy():
    text = """
    def ignore_mask(padding_mask, n):
        return padding_mask is None or padding_mask[:, :n].all()

    def make_mask(attention_mask, device):
        attention_mask = attention_mask.to(device=device, dtype=bool)
        return torch.all(attention_mask == 1)

    def other(padding_mask):
        return padding_mask.all()
    """
    assert [site.target for site in sites(text)] == ["ignore_mask", "make_mask"]
    assert not any(site.counted for site in sites(text))
    made = edited(text)
    assert "veomni_host.values(padding_mask)[:, :n].all()" in made
    assert "veomni_host.converted(attention_mask, attention_mask.to(device=device, dtype=bool))" in made
    assert "torch.all(veomni_host.values(attention_mask) == 1)" in made


TOWER = """
class Tower:
    def positions(self, grid_thw):
        for t, h, w in grid_thw.tolist():
            ids = [t, h, w]
        return self.table[ids]

    def forward(self, states, grid_thw):
        ends = torch.repeat_interleave(grid_thw[:, 1], grid_thw[:, 0]).cumsum(0)
        return states.split(ends)
"""


def test_a_tower_that_computes_sizes_itself():
    read, computed = sites(TOWER)
    assert (read.target, read.variant, read.counted) == ("Tower.positions", "read_once", False)
    assert (computed.target, computed.variant) == ("Tower.forward", "computed_on_host")
    text = edited(TOWER)
    assert "in veomni_host.values(grid_thw).tolist():" in text
    assert "ends=veomni_host.of_sizes(lambdagrid_thw:torch.repeat_interleave(" in "".join(text.split())


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        # Sizes are used in a way that is not known.
        ("ids = [t, h, w]", "ids = [t, h, grid_thw.device]", ["Tower.forward"]),
        ("grid_thw):\n        for", "grid_thw, more):\n        for", ["Tower.forward"]),
        # What a statement computes follows from something else.
        ("grid_thw[:, 0])", "states)", ["Tower.positions"]),
        ("ends = torch", "torch = ends = torch", ["Tower.positions"]),
        # Nothing waits for it.
        ("torch.repeat_interleave(grid_thw[:, 1], grid_thw[:, 0]).cumsum(0)", "grid_thw[0]", ["Tower.positions"]),
    ],
)  # fmt: skip
def test_towers_whose_code_is_not_known_to_compute_with_sizes_alone(old, new, left):
    assert [site.target for site in sites(changed(TOWER, (old, new)))] == left


def test_a_method_of_sizes_and_numbers_runs_on_the_host():
    text = TOWER.replace("self.table[ids]", "torch.cat(ids) * self.merge_size")
    assert "    @veomni_host.computed()\n    def positions(self" in edited(text)
    assert "computed()" not in edited(
        text.replace("torch.cat(ids)", "torch.zeros(3, device=self.merge_size)")
    )


SOUNDS = """
class Tower:
    def __init__(self, config):
        self.window = config.window

    def padded(self, parts, part_lens):
        mask = torch.zeros((len(parts), part_lens.max()), device=parts[0].device)
        rows = torch.zeros((len(part_lens), part_lens.max()), device=mask.device)
        return mask, rows.bool()

    def forward(self, states, feature_lens=None):
        count = torch.ceil(feature_lens / self.window).long()
        part_lens = torch.full((count.sum(),), self.window, device=feature_lens.device)
        part_lens[part_lens == 0] = 2
        more, mask = self.padded(states.split(part_lens.tolist()), part_lens)
        ends = mask.sum(1).cumsum(0)
        for layer in self.layers:
            states = layer(states[mask], ends)
        return states
"""


def test_what_follows_from_lengths_stays_on_the_host():
    assert [(site.target, site.variant, site.counted) for site in sites(SOUNDS)] == [
        ("Tower.forward", "computed_on_host", False),
        ("Tower.padded", "computed_on_host", False),
    ]
    made = "".join(edited(SOUNDS).split())
    for text in (
        "count=torch.ceil(veomni_host.values(feature_lens)/self.window).long()",
        "device=veomni_host.values(feature_lens).device)",
        "part_lens[part_lens==0]=2",
        "states.split(part_lens.tolist()),veomni_host.sent(part_lens,feature_lens.device))",
        "ends=veomni_host.sent(veomni_host.values(mask).sum(1).cumsum(0),mask.device)",
        "layer(states[veomni_host.picked(mask)],ends)",
        # What is as long as something else stays where it is; how long it is, the host knows.
        "(len(parts),veomni_host.values(part_lens).max()),device=parts[0].device)",
        "device=veomni_host.values(part_lens).device,)",
        "returnmask,veomni_host.sent(rows.bool(),mask.device)",
    ):
        assert text in made, text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("feature_lens=None", "feature_sizes=None"),
        # Names that something else takes part in.
        ("feature_lens / self.window", "feature_lens / self.scale"),
        ("torch.ceil(feature_lens", "torch.rand_like(feature_lens"),
        ("part_lens[part_lens == 0] = 2", "part_lens[states[0]] = 2"),
        ("part_lens[part_lens == 0] = 2", "part_lens = part_lens if self.window else states[0]"),
        ("part_lens[part_lens == 0] = 2", "for part_lens in states: pass"),
        ("count = torch", "self.count, count = torch"),
        # It may be the copy that others read.
        ("torch.full((count.sum(),), self.window, device=feature_lens.device)", "count[1:]"),
        ("self.window, device=feature_lens.device", "self.window, device=self.where"),
        ("(count.sum(),), self.window, device=feature_lens.device", "count, 'cuda'"),
    ],
)
def test_what_does_not_follow_from_lengths_stays_on_the_device(old, new):
    made = "".join(edited(changed(SOUNDS, (old, new), count=1)).split())
    assert "states.split(part_lens.tolist())" in made
    assert "veomni_host.sent(part_lens" not in made and "values(mask)" not in made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count = torch", "feature_lens = feature_lens * 2; count = torch"),
        ("count = torch", "more = lambda: 0; count = torch"),
        ("count = torch", "F = states; count = torch"),
    ],
)
def test_a_tower_whose_names_are_bound_in_other_ways_is_left_alone(old, new):
    assert not sites(SOUNDS.replace(old, new, 1))


@pytest.mark.parametrize(
    ("body", "hosted", "plain"),
    [
        ("n = lens.max()\nk = self.size * 3", "n", "k"),
        ("rows = []\nfor i in lens:\n    rows.append(i + 1)", "i rows", ""),
        ("n = lens.max()\nn += 1", "n", ""),
        ("n = lens + states", "", ""),
        ("n = lens.max()\nm = n + 1\nn = states", "", ""),
        ("a = b = lens.max()", "", ""),
        # It changes what others read.
        ("part = lens[1:]\npart += 1", "", ""),
        ("part = lens\npart[0] = 1", "", ""),
    ],
)
def test_what_follows_from_lengths_is_known_by_name(body, hosted, plain):
    text = f"def forward(self, states, lens):\n{textwrap.indent(body, ' ' * 4)}"
    function = Document(text, "lookalike").tree.body[0]
    names = names_of(function, {"lens"}, set(), "size".__eq__, {})
    assert (names.length, names.carried) == ("lens", {"lens"})
    assert (names.hosted, names.plain) == ({*hosted.split()}, {*plain.split()})


FRAMES = """
class Model:
    def get_video_features(self, pixels, video_grid_thw=None):
        frames = torch.repeat_interleave(video_grid_thw[:, 1:], video_grid_thw[:, 0], dim=0)
        sizes = torch.cat([video_grid_thw.new_ones(frames.shape[0], 1), frames], dim=1)
        listed = video_grid_thw.tolist()
        found = self.visual(pixels, grid_thw=sizes, number=len(listed))
        return found.split((video_grid_thw.prod(-1) // self.visual.merge_size**2).tolist())
"""


def test_sizes_of_frames_are_computed_on_the_host():
    (site,) = sites(FRAMES)
    assert (site.status, site.variant) == (Status.ROUTED, "read_once")
    made = "".join(edited(FRAMES).split())
    for text in (
        "repeat_interleave(veomni_host.values(video_grid_thw)[:,1:],veomni_host.values(video_grid_thw)[:,0],dim=0)",
        "sizes=veomni_host.sent(torch.cat([veomni_host.values(video_grid_thw).new_ones(",
        "frames],dim=1),video_grid_thw.device",
        "listed=veomni_host.values(video_grid_thw).tolist()",
        "((veomni_host.values(video_grid_thw).prod(-1)//",
    ):
        assert text in made, text


def test_numbers_of_a_tower_have_a_name():
    text = """
    class Model:
        def get_image_features(self, pixels, image_grid_thw):
            number = self.tower.merge_size[0] * self.tower.merge_size[1]
            return (image_grid_thw.prod(-1) // number).tolist()
    """
    assert "(veomni_host.values(image_grid_thw).prod(-1) // number).tolist()" in edited(text)
    for old, new in (
        ("self.tower.merge_size[1]", "self.tower.weight[1]"),
        ("self.tower.merge_size[1]", "pixels.shape[1]"),
        ("self.tower.merge_size[1]", "self.tower.merge_size[1]\n            number = pixels[0]"),
    ):
        (site,) = sites(text.replace(old, new))
        assert site.status is Status.MISSED and "number" in site.reason


def test_positions_are_known_where_a_statement_counts_them():
    text = """
    class Model(nn.Module):
        def forward(self, x, positions=None, seen=0):
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device) + seen
                positions = positions.unsqueeze(0)
            return self.layers(x, positions)
    """
    assert "positions = positions.unsqueeze(0)" in edited(text)
    assert "veomni_host.counted(positions, seen)" in edited(text)
    inside = "(positions := torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)"
    first = "positions = torch.arange(x.shape[1], device=x.device) + seen\n                positions = positions.unsqueeze(0)"
    (site,) = sites(text.replace(first, f"positions = {inside}"))
    assert (site.status, site.target) == (Status.MISSED, "Model.forward")
    assert site.reason == "its positions are counted inside of a statement" and not site.counted
