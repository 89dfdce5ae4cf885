"""Fields of outputs where two processes share sequences: each computes its rows, and all have all numbers."""

CLOSE = 1e-5


def test_fields_and_policy_gradients_are_those_of_one_process(ranks):
    told = ranks.once("facts_of_token_outputs:facts", 2, "sp=2", sizes="sp=2")
    assert len(told[0]) == 21
    assert [{case: error for case, error in facts.items() if error > CLOSE} for facts in told] == [{}, {}]
