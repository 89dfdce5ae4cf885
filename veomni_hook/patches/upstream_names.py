"""What upstream calls the variables of its models, where only the name says what they are.

Names are read from the code wherever it says what they are for. Here are the others: a meaning, its names and
the releases of transformers in which a parameter of some model was seen to have each (of 5.9, 5.23 and 5.24).
Whoever asks for a meaning and finds none of its names says so: a site is missed with that reason.
"""

from __future__ import annotations

__all__ = ["ENDINGS", "KEPT", "LENGTHS", "POSITIONS", "SECONDS", "UPSTREAM_NAMES", "names"]

_EVER = ("5.9", "5.23", "5.24")

UPSTREAM_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "the cache": {"past_key_values": ("5.9", "5.23"), "cache_params": ("5.9", "5.23"), "cache": _EVER},
    "whether it makes a cache": {"use_cache": _EVER},
    "token ids": {"input_ids": _EVER},
    "embeddings": {"inputs_embeds": _EVER},
    "positions": {"position_ids": _EVER},
    "mask": {"attention_mask": _EVER},
    "another model's output": {"encoder_hidden_states": _EVER},
    "mask of padding": {"padding_mask": _EVER},
    # Arguments of towers: what holds data, by its form, and what says how features are computed.
    "images": {"pixel_values": _EVER, "pixel_values_videos": _EVER, "pixel_values_images": _EVER},
    "grids": {"image_grid_thw": _EVER, "video_grid_thw": _EVER},
    "merge sizes": {"image_merge_sizes": _EVER, "video_merge_sizes": _EVER},
    "positions of patches": {"image_position_ids": _EVER, "video_position_ids": _EVER},
    "frames of videos": {"num_frames_per_video": ("5.23", "5.24")},
    "sizes of images": {"image_sizes": _EVER},
    "shapes of images": {"spatial_shapes": _EVER},
    "mask of pixels": {"pixel_attention_mask": _EVER},
    "spectra": {"input_features": _EVER},
    "lengths of spectra": {
        "feature_attention_mask": _EVER,
        "input_features_mask": _EVER,
        "audio_feature_lengths": _EVER,
    },
    "options of towers": {
        "interpolate_pos_encoding": _EVER,
        "output_attentions": _EVER,
        "output_hidden_states": _EVER,
        "return_dict": _EVER,
        "vision_feature_layer": _EVER,
        "vision_feature_select_strategy": _EVER,
    },
}

#: How names end, where models put words of their own in front.
ENDINGS: dict[str, tuple[str, ...]] = {
    "sizes": ("grid_thw",),
    "lengths": ("_lens",),
    "masks of sounds": ("feature_attention_mask",),
    "numbers": ("_size", "_unit", "_factor", "_ratio"),
}
#: Methods of caches that return tensors ``[..., positions, width]`` with those in front: how many they get.
KEPT: dict[str, int] = {"update": 2, "update_indexer": 1, "update_index": 1, "store_compression_weights": 2}
#: The functions that map lengths of sounds to lengths of features.
LENGTHS = "_get_feat_extract_output_lengths"
#: The method that computes positions in three dimensions.
POSITIONS = "get_rope_index"
#: What is in the names of its arguments that say how long a frame is shown.
SECONDS = "second_per_grid"


def names(meaning: str) -> tuple[str, ...]:
    """Return the names of a meaning, the oldest first."""
    return tuple(UPSTREAM_NAMES[meaning])
