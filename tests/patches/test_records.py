import dataclasses

from veomni_hook.patches.records import ImportSpec, Patch, PatchType, PositionedHelper


def test_fields_that_patchgen_has_come_first_and_in_its_order():
    positional = [f.name for f in dataclasses.fields(Patch) if not f.kw_only]
    assert positional == [
        "patch_type",
        "target",
        "replacement",
        "source_module",
        "description",
        "replacement_source",
        "name_map",
    ]
    for kind, names in (
        (ImportSpec, ["module", "names", "alias", "is_from_import"]),
        (PositionedHelper, ["target", "helper", "placement"]),
    ):
        assert [f.name for f in dataclasses.fields(kind) if not f.kw_only] == names


def test_patches_do_not_share_what_can_change():
    one, other = (Patch(PatchType.GUARD, "A", None) for _ in range(2))
    assert one == other and one.relies_on is not other.relies_on
