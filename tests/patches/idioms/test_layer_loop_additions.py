"""Rows that are added between layers: which loops are split, and near misses with their reasons."""

import pytest

from tests.patches.idioms.applied import spliced
from tests.patches.idioms.layer_loops import CALL, changed, sites
from tests.patches.idioms.test_layer_loop import calls
from veomni_hook.patches.site import Status

ADDED = """\
            if features is not None and index in range(len(features)):
                hidden_states = self.add(hidden_states, marks, features[index])
"""
ADD = """
    def add(self, hidden_states, marks_mask, rows):
        marks_mask = marks_mask.to(hidden_states.device)
        rows = rows.to(hidden_states.device, hidden_states.dtype)
        hidden_states = hidden_states.clone()
        sums = hidden_states[marks_mask, :] + rows
        hidden_states[marks_mask, :] = sums
        return hidden_states

    def forward(
        self, input_ids=None, marks=None, features=None, """
FORWARD = "\n    def forward(\n        self, input_ids=None, "
LOOP = "for decoder_layer in self.layers[: self.config.num_hidden_layers]"
NUMBERED = "for index, decoder_layer in enumerate(self.layers)"
DEEP = ((FORWARD, ADD), (LOOP, NUMBERED), (CALL, CALL + ADDED))
ROWS = "features = veomni_sequence.rows_to_add(self, self.add, hidden_states, marks, features)"


@pytest.mark.parametrize("within", ["index in range(len(features))", "index < len(features)"])
def test_rows_are_cut_before_the_loop_and_added_in_it(within):
    text = changed(*DEEP, ("index in range(len(features))", within))
    (site,) = sites(text)
    assert site.status is Status.ROUTED, site.reason
    assert "TinyModel.add" in site.relies_on
    found = calls(spliced(text, [site]))
    assert found[0].startswith("hidden_states, position_embeddings = veomni_sequence.shard(self, ")
    assert ROWS in found
    assert "hidden_states = veomni_sequence.added(self.add, hidden_states, marks, features[index])" in found
    assert found.index(ROWS) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The method does something else, or not to all rows.
        ("sums = hidden_states[marks_mask, :] + rows", "sums = hidden_states[marks_mask, :] * rows"),
        (
            "        return hidden_states\n\n    def forward",
            "        return hidden_states * 2\n\n    def forward",
        ),
        # What it is called with is used or changed elsewhere.
        ("features[index])", "features[0])"),
        ("self.add(hidden_states, marks,", "self.add(hidden_states, marks[:, 1:],"),
        ("        # The layers.\n", "        marks = ~marks\n"),
        ("last_hidden_state=hidden_states,", "last_hidden_state=hidden_states, rows=features,"),
        ("index in range(len(features))", "index in range(hidden_states.shape[1])"),
        # It happens twice.
        (ADDED, ADDED + ADDED),
    ],
)
def test_near_misses(old, new):
    (site,) = sites(changed(*DEEP, (old, new)))
    assert site.status is Status.REFUSED
