"""A process that trains small models with budgets of memory: `python -m tests.memory.facts_of_budgets`.

Printed as JSON, of each case: what was chosen, the budget, what a step really took, how many layers are
checkpointed, and how far the gradients are from those without a budget.
"""

import json
import warnings

import torch

from tests.memory import facts_of_models
from tests.memory.facts_of_models import model_of
from tests.memory.truth import real_peak


def batch(rows, tokens):
    ids = torch.randint(1, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def trained(model, inputs, optimizer, *, real=True):
    model.zero_grad()
    model(**inputs).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients, real_peak(model, inputs, optimizer) if real else 0


def off(gradients, expected):
    return max(((one - two).norm() / two.norm()).item() for one, two in zip(gradients, expected, strict=True))


def facts(name, share):
    """Train with ``share`` of what a step takes without a budget as the budget."""
    from veomni_hook.memory import budget, parts

    inputs = batch(2, 1024)
    model = model_of(name)
    parts.tell("")  # now: the import of a model's module tells the setting
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected, before = trained(model, inputs, optimizer)
    most = int(share * before)
    said = []
    parts.tell(f"{most}B", say=said.append)
    gradients, took = trained(model, inputs, optimizer)
    return {
        "said": said,
        "chosen": budget.chosen_for(model),
        "before": before,
        "budget": most,
        "took": took,
        "parts": parts.step(),
        "layers": sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "off": off(gradients, expected),
    }


def refused(change):
    """Train what cannot be predicted; return the warning and the parts in force."""
    from veomni_hook.memory import parts

    parts.tell("")
    parts.tell("1GiB", shared=change == "shared")
    model = model_of("llama")
    inputs = batch(1, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if change == "no loss":
            model(input_ids=inputs["input_ids"]).logits.sum().backward()
        else:
            model(**inputs).loss.backward()
    return {
        "warned": [str(one.message) for one in caught if "MEMORY" in str(one.message)],
        "parts": parts.step(),
    }


def by_trainer(name):
    """Let Trainer train with a budget that a step without checkpoints exceeds."""
    from veomni_hook.memory import budget, parts
    from veomni_hook.memory.prediction import predict

    def changes(model):
        return facts_of_models.trained(model, facts_of_models.by_trainer, name)[1].values()

    model, said = model_of("llama"), []
    parts.tell("")
    expected = changes(model_of("llama"))
    most = 0.9 * predict(model, batch(2, 24)).peak
    parts.tell(f"{int(most / budget.SHARE)}B", say=said.append)
    return {
        "off": off(changes(model), expected),
        "layers": sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "said": said,
    }


def grown():
    """Train on longer batches, and with gradients that stay; return the sentences."""
    from veomni_hook.memory import parts

    said = []
    parts.tell("")
    parts.tell("1GiB", say=said.append)
    model = model_of("llama")
    for tokens in (16, 8, 16, 32):
        model(**batch(1, tokens)).loss.backward()
    model.eval()
    model(**batch(1, 64))
    model.train()
    with torch.no_grad():
        model(**batch(1, 64))
    return said


def changed_before_its_backward():
    """Choose other parts between the forward and the backward of a layer; return how far gradients are."""
    from veomni_hook.memory import parts

    parts.tell("")
    inputs = batch(2, 64)
    model = model_of("llama")
    expected, _ = trained(model, inputs, None, real=False)
    parts.tell("1GiB")
    parts.choose("checkpoint")
    from veomni_hook.memory.remedies import checkpoint_layers, layers_of

    checkpoint_layers(layers_of(model))
    loss = model(**inputs).loss
    parts.choose("checkpoint,offload,tiles")
    loss.backward()
    return off([p.grad for p in model.parameters()], expected)


def main():
    import veomni_hook.install  # noqa: F401
    from veomni_hook.memory import host, offload, tiles

    host.BLOCK = offload.BLOCK = 4096
    offload.LEAST = tiles.LEAST = tiles.MULTIPLE = 1
    print(
        json.dumps(
            {
                "cases": {
                    f"{name} {share}": facts(name, share)
                    for name, share in (
                        ("llama", 2.0),
                        ("llama", 0.8),
                        ("llama", 0.01),
                        ("qwen3_moe", 0.8),
                        ("llama with LoRA", 0.8),
                    )
                },
                "refused": {change: refused(change) for change in ("no loss", "shared")},
                "by_trainer": {name: by_trainer(name) for name in ("Trainer", facts_of_models.BFLOAT16)},
                "grown": grown(),
                "changed": changed_before_its_backward(),
            }
        )
    )


if __name__ == "__main__":
    main()
