"""Names of functions, classes, decorators and arguments whose effect on positions is known."""

from __future__ import annotations

__all__ = [
    "ATTENTION_ARGUMENTS",
    "DECORATORS",
    "INTERFACE",
    "LOOPS",
    "MODULES",
    "NUMBERS",
    "PACKAGED",
    "QUESTIONS",
    "RANDOM",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Arguments of attention that hold no positions, or all of them: the interface's implementations know them.
ATTENTION_ARGUMENTS = frozenset(
    """
    attention_mask cache_position cu_seq_lens_k cu_seq_lens_q deterministic dropout enable_gqa is_causal
    is_training layer_idx max_length_k max_length_q output_attentions position_ids s_aux scaling
    sliding_window softcap training use_cache use_top_left_mask
    """.split()
)
#: Decorators that leave what a method computes as it is.
DECORATORS = frozenset(
    """
    auto_docstring can_return_tuple capture_outputs check_model_inputs classmethod deprecate_kwarg
    dynamic_rope_update force_accelerate_hooks merge_with_config_defaults no_grad override staticmethod
    torch_compilable_check use_kernel_forward_from_hub use_kernel_func_from_hub use_kernelized_func
    """.split()
)
_POINTWISE = """
Dropout ELU GELU Hardtanh Identity LeakyReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Tanh
""".split()
#: Classes of modules, torch's and others, as the operation that they do.
MODULES = {
    **dict.fromkeys(_POINTWISE, "silu"),
    "Linear": "linear",
    "LayerNorm": "layer_norm",
    "RMSNorm": "layer_norm",
    "Embedding": "one_hot",
}
#: Norms of packages, of the last dimension.
PACKAGED = frozenset({"FusedRMSNormGated"})
RANDOM = {"bernoulli", "rand", "randint", "randn", "randperm"}
QUESTIONS = {"hasattr", "isinstance", "callable", "issubclass", "type", "id", "print", "repr"}
NUMBERS = {"abs", "bool", "float", "int", "max", "min", "round", "str", "sum", "pow", "divmod"}
LOOPS = {"range", "reversed", "sorted", "set", "dict"}
