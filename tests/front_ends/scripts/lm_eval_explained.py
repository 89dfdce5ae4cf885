"""lm-eval's command; in the end it prints what `explain` says of the model that it evaluated."""

import runpy

from lm_eval.models.huggingface import HFLM

import veomni_hook

evaluators = []
create_model = HFLM._create_model


def create_and_keep(self, *args, **kwargs):
    evaluators.append(self)
    return create_model(self, *args, **kwargs)


HFLM._create_model = create_and_keep

if __name__ == "__main__":
    runpy.run_module("lm_eval", run_name="__main__")
    print(veomni_hook.explain(evaluators[0].model))
