"""Changes of a form after which it computes something else, by name; and what may stand around it and change it.

What `tests.proof.mutants` changes at random comes on top of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.stress.forms import Form

_EPS = r"rsqrt\((.+?) \+ (self\.\w+|epsilon|eps)\)"
#: What it is, a pattern in the text of a form, and what stands there instead; by op.
WORDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "norms": (
        ("eps outside", _EPS, r"rsqrt(\1).add(\2)"),
        ("eps under another root", _EPS, r"rsqrt((\1).sqrt().add(\2).square())"),
        ("no eps", _EPS, r"rsqrt(\1)"),
        ("eps twice", _EPS, r"rsqrt(\1 + 2 * \2)"),
        ("eps as a floor", _EPS, r"rsqrt((\1).clamp(min=\2))"),
        ("sqrt", r"torch\.rsqrt", "torch.sqrt"),
        ("another axis", r"mean\(-1", "mean(-2"),
        ("all axes", r"mean\(-1", "mean((-2, -1)"),
        ("sum", r"\.mean\(", ".sum("),
        ("largest", r"\.mean\(-1", ".amax(-1"),
        ("fourth power", r"\.pow\(2\)", ".pow(4)"),
        ("absolute values", r"\.pow\(2\)", ".abs()"),
        ("centred", r"(\w+)\.pow\(2\)", r"(\1 - \1.mean(-1, keepdim=True)).pow(2)"),
        ("without its first value", r"(\w+)\.pow\(2\)", r"\1[..., 1:].pow(2)"),
        ("no cast", r"\.to\(torch\.float32\)|\.float\(\)", ""),
        ("cast to float64", r"\.to\(torch\.float32\)|\.float\(\)", ".double()"),
        ("cast to bfloat16", r"\.to\(torch\.float32\)|\.float\(\)", ".bfloat16()"),
        ("no cast back", r"\.to\(kind\)|\.type_as\(v\)|\.to\(v\.dtype\)", ""),
        ("1 + weight", r"self\.(weight|gain)(?= \*)", r"(1 + self.\1)"),
        ("2 + weight", r"1(\.0)? \+ self\.", "2 + self."),
        ("1 - weight", r"1(\.0)? \+ self\.", "1 - self."),
        ("weight squared", r"self\.weight(?= \*)", "self.weight.square()"),
        ("weight detached", r"self\.(weight|gain)\b(?! =)(?=[ .)]|$)", r"self.\1.detach()"),
        ("input detached", r"(\w+)\.pow\(2\)", r"\1.detach().pow(2)"),
        ("another activation", r"F\.silu\(|nn\.functional\.silu\(|swish\(|torch\.sigmoid\(", "F.gelu("),
        ("negative", r"return (.+)", r"return -(\1)"),
        ("bias", r"return (.+)", r"return \1 + 0.1"),
    ),
    "rotary": (
        ("no sign", r"-x\[", "x["),
        ("both signs", r"x\[\.\.\., :half\]", "-x[..., :half]"),
        ("halves exchanged", r"\(-x\[\.\.\., half:\], x\[\.\.\., :half\]\)", "(x[..., :half], -x[..., half:])"),
        ("pairs for halves", r"-x\[\.\.\., half:\], x\[\.\.\., :half\]", "-x[..., 1::2], x[..., ::2]"),
        ("halves for pairs", r"-x\[\.\.\., 1::2\], x\[\.\.\., ::2\]", "-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]"),
        ("a quarter", r"// 2", "// 4"),
        ("cos and sin exchanged", r"x \* cos \+ (.+?) \* sin", r"x * sin + \1 * cos"),
        ("minus", r"(x\S* \* cos) \+", r"\1 -"),
        ("cos twice", r"\* sin\b", "* cos"),
        ("sin negated", r"\* sin\b", "* -sin"),
        ("scaled", r"\* cos\b", "* cos * 0.7"),
        ("the query twice", r"\(k(\.float\(\))?, cos", r"(q\1, cos"),
        ("key as it is", r"turned_halves\(k, cos, sin\)|turned_pairs\(k, cos, sin\)", "k"),
        ("another dimension", r"sin\.unsqueeze\(unsqueeze_dim\)", "sin.unsqueeze(1)"),
        ("no cast back", r"\.to\(q\.dtype\)", ""),
        ("cast to the key's dtype", r"\.to\(q\.dtype\)", ".to(k.dtype)"),
        ("cast in", r"(\bturned_\w+\()q, cos", r"\1q.double(), cos"),
        ("cos clamped", r"\* cos\b", "* cos.clamp(-1, 1)"),
        ("along another axis", r"dim=-1\)", "dim=-2)"),
        ("in place", r"^(def apply_rotary_pos_emb\((\w+).+)$", r"\1\n    \2.mul_(1.5)"),
    ),
    "MLPs": (
        ("GELU", r"nn\.SiLU\(\)", "nn.GELU()"),
        ("ReLU", r"nn\.SiLU\(\)", "nn.ReLU()"),
        ("in-place activation", r"nn\.SiLU\(\)", "nn.SiLU(inplace=True)"),
        ("an activation with a parameter", r"nn\.SiLU\(\)", "nn.PReLU()"),
        ("softmax", r"nn\.SiLU\(\)", "nn.Softmax(dim=-1)"),
        ("tanh", r"F\.silu", "torch.tanh"),
        ("sum", r"(self\.act_fn\(.+?\)\)|act_fn\(gate\)|gate) \* (self\.up|up)", r"\1 + \2"),
        ("up activated", r"\* self\.up_proj\(x\)", "* self.act_fn(self.up_proj(x))"),
        ("gate alone", r" \* self\.up_proj\(x\)", ""),
        ("gate twice", r"self\.up_proj\(x\)", "self.gate_proj(x)"),
        ("halves exchanged", r"gate, up = self", "up, gate = self"),
        ("neighbours for halves", r"self\.gate_up_proj\(x\)\.chunk\(2, dim=-1\)", "self.gate_up_proj(x)[..., ::2], self.gate_up_proj(x)[..., 1::2]"),
        ("another limit", r"max=self\.limit\)", "max=self.limit + 0.2)"),
        ("two-sided gate", r"\.clamp\(max=self\.limit\)", ".clamp(-self.limit, self.limit)"),
        ("one-sided up", r"min=-self\.limit, max=self\.limit", "max=self.limit"),
        ("another alpha", r"gate \* self\.alpha", "gate * (self.alpha + 0.3)"),
        ("no one", r"\(up \+ 1\.0\)", "up"),
        ("scaled", r"return (.+)", r"return \1 * 0.5"),
        ("noise", r"self\.up_proj\(x\)", "(self.up_proj(x) + torch.rand(1, device=x.device))"),
        ("input changed", r"return ", "x.mul_(2)\n        return "),
        ("in float64", r"\.float\(\)", ".double()"),
    ),
    "experts": (
        ("GELU", r"nn\.SiLU\(\)", "nn.GELU()"),
        ("renormalised", r"shares\[row, slot, None\]", "(shares / shares.sum(-1, keepdim=True))[row, slot, None]"),
        ("softmax of weights", r"shares\[row, slot, None\]", "shares.softmax(-1)[row, slot, None]"),
        ("no weights", r" \* shares\[row, slot, None\]", ""),
        ("weights squared", r"shares\[row, slot, None\]", "shares[row, slot, None] ** 2"),
        ("weights exchanged", r"shares\[row, slot, None\]", "shares.flip(-1)[row, slot, None]"),
        ("weights detached", r"shares\[row, slot, None\]", "shares[row, slot, None].detach()"),
        ("weights before", r"rows\[row\]", "(rows[row] * shares[row, slot, None])"),
        ("first expert left out", r"for bank in used:", "for bank in used[1:]:"),
        ("last expert left out", r"for bank in used:", "for bank in used[:-1]:"),
        ("another expert's weight", r"self\.second\[bank\]", "self.second[bank - 1]"),
        ("copied and not added", r"index_add_", "index_copy_"),
        ("halves exchanged", r"gate, up = ", "up, gate = "),
        ("sum", r"self\.act\(gate\) \* up", "self.act(gate) + up"),
        ("starts at one", r"torch\.zeros_like", "torch.ones_like"),
        ("starts with the rows", r"torch\.zeros_like\(rows\)", "rows.clone()"),
        ("doubled", r"return total", "return total * 2"),
        ("another limit", r"max=self\.bound\)", "max=self.bound + 0.2)"),
        ("scaled inside", r"out = out \* shares", "out = out * 1.5 * shares"),
        ("cast in between", r"out = out \* shares", "out = out.bfloat16() * shares"),
    ),
    "routers": (
        ("sigmoid", r"F\.softmax\(logits, dim=-1, dtype=torch\.float\)", "torch.sigmoid(logits.float())"),
        ("another axis", r"softmax\(logits, dim=-1", "softmax(logits, dim=0"),
        ("one more", r"self\.top_k, dim", "self.top_k + 1, dim"),
        ("the smallest", r"torch\.topk\(probs, self\.top_k, dim=-1\)", "torch.topk(probs, self.top_k, dim=-1, largest=False)"),
        ("root of the sum", r"weights\.sum\(dim=-1, keepdim=True\)", "weights.sum(dim=-1, keepdim=True).sqrt()"),
        ("largest", r"weights\.sum\(dim=-1, keepdim=True\)", "weights.amax(dim=-1, keepdim=True)"),
        ("bias in the weights", r"scores\.gather\(", "(scores + self.bias).gather("),
        ("no bias", r"scores \+ self\.bias", "scores"),
        ("bias subtracted", r"scores \+ self\.bias", "scores - self.bias"),
        ("tanh", r"\.sigmoid\(\)", ".tanh()"),
        ("another fill", r"\.bool\(\), 0\.0\)", ".bool(), -1.0)"),
        ("best of a group", r"topk\(2, dim=-1\)\[0\]\.sum\(-1\)", "amax(-1)"),
        ("another epsilon", r"1e-20", "0.1"),
        ("logits capped", r"(logits = F\.linear.+)", r"\1\n        logits = torch.tanh(logits)"),
        ("jitter", r"(logits = F\.linear.+)", r"\1\n        logits = logits + torch.rand_like(logits)"),
        ("in bfloat16", r"dtype=torch\.float\)", "dtype=torch.bfloat16)"),
    ),
    "losses": (
        ("shifted once more", r"labels=labels,", "labels=labels.roll(1, -1),"),
        ("not shifted", r"labels=labels,", "labels=labels, shift_labels=labels,"),
        ("another ignored label", r"labels=labels,", "labels=labels.masked_fill(labels == 3, -100),"),
        ("smoothed afterwards", r"(            loss = .+)", r"\1\n            loss = loss + 0.1 * logits.float().square().mean()"),
        ("doubled", r"(            loss = .+)", r"\1\n            loss = loss * 2"),
        ("bias", r"11, bias=False", "11, bias=True"),
        ("softcap of another width", r"self\.config\.final_logit_softcapping$", "3.0"),
        ("sigmoid", r"torch\.tanh", "torch.sigmoid"),
        ("logits shifted", r"(logits = self\.lm_head\(.+?\)+)$", r"\1 + torch.arange(11)"),
        ("logits detached", r"logits=logits, labels", "logits=logits.detach(), labels"),
        ("logits in bfloat16", r"logits=logits, labels", "logits=logits.bfloat16(), labels"),
        ("logits of another head", r"loss=loss, logits=logits", "loss=loss, logits=logits * 2"),
        ("another loss", r"staticmethod\(ForCausalLMLoss\)", "staticmethod(lambda logits, labels, vocab_size, **kw: logits.float().square().mean())"),
        ("a wrapped loss", r"staticmethod\(ForCausalLMLoss\)", "staticmethod(lambda *args, **kw: ForCausalLMLoss(*args, **kw) / 2)"),
        ("hidden states scaled", r"self\.model\(x\)", "self.model(x) * 0.5"),
        ("head's weight tied to nothing", r"self\.lm_head\(hidden", "F.linear(hidden"),
        ("no softmax", r"functional\.softmax\((.+?), dim=-1\)", r"\1"),
        ("another axis", r"softmax\((.+?), dim=-1\)", r"softmax(\1, dim=0)"),
        ("one expert more", r"topk\(top_k\)", "topk(top_k + 1)"),
        ("the first expert alone", r"topk\(top_k\)", "topk(1)"),
        ("not scaled", r" \* num_experts", ""),
        ("scaled by top_k", r" \* num_experts", " * num_experts * top_k"),
        ("mask inverted", r"attention_mask\.reshape\(-1\)", "(1 - attention_mask).reshape(-1)"),
        ("squared", r"sums / rows", "sums / rows * (sums / rows)"),
    ),
}  # fmt: skip

#: What may stand around a form: a name, and text after it; ``{cls}`` is the class, ``{name}`` the function or
#: helper. A class ``Other`` in the text is what is called instead.
STRUCTURE: tuple[tuple[str, str], ...] = (
    (
        "forward replaced below",
        "\n_held = {cls}.forward\n\n\ndef _replaced(self, *args, **kwargs):\n"
        "    return _held(self, args[0] * 0.5, *args[1:], **kwargs)\n\n\n{cls}.forward = _replaced\n",
    ),
    (
        "forward wrapped below",
        "\nimport functools\n\n\ndef _halved(function):\n    @functools.wraps(function)\n    def run(self, *args, **kwargs):\n"
        "        return function(self, args[0] * 0.5, *args[1:], **kwargs)\n    return run\n\n\n{cls}.forward = _halved({cls}.forward)\n",
    ),
    (
        "forward overridden in a subclass",
        "\n\nclass Other({cls}):\n    def forward(self, *args, **kwargs):\n"
        "        return super().forward(args[0] * 0.5, *args[1:], **kwargs)\n",
    ),
    ("__call__ overridden", "\n\nclass Other({cls}):\n    def __call__(self, *args, **kwargs):\n        return super().__call__(args[0] * 0.5, *args[1:], **kwargs)\n"),
    ("helper replaced below", "\n{cls}.{helper} = lambda self, *args: args[0] * 0.5\n"),
    ("helper overridden in a subclass", "\n\nclass Other({cls}):\n    def {helper}(self, *args):\n        return args[0] * 0.5\n"),
    ("helper of a mixin in front", "\n\nclass Mixin:\n    def {helper}(self, *args):\n        return args[0] * 0.5\n\n\nclass Other(Mixin, {cls}):\n    pass\n"),
    ("helper of an instance", "\n\nclass Other({cls}):\n    def __init__(self, *args):\n        super().__init__(*args)\n        self.{helper} = lambda *args: args[0] * 0.5\n"),
    ("function defined again", "\n\ndef {name}({first}, *args, **kwargs):\n    return {first} * 0.5\n"),
    (
        "function wrapped below",
        "\nimport functools\n\n\ndef _halved(function):\n    @functools.wraps(function)\n    def run(first, *args, **kwargs):\n"
        "        return function(first * 0.5, *args, **kwargs)\n    return run\n\n\n{name} = _halved({name})\n",
    ),
    ("its module's torch is another", "\n\nclass _Torch:\n    def __getattr__(self, name):\n        found = getattr(_torch, name)\n        return (lambda x, *a, **k: found(x, *a, **k) * 0.5) if name in ('rsqrt', 'cat', 'stack', 'tanh', 'topk', 'sum') else found\n\n\n_torch, torch = torch, _Torch()\n"),
)  # fmt: skip


def perturbed(form: Form) -> Iterator[tuple[str, Form]]:
    """Every perturbation that a form has a place for, each with the form that it gives."""
    for name, pattern, other in WORDS[form.op]:
        text = re.sub(pattern, other, form.source, flags=re.MULTILINE)
        if text != form.source and _compiles(text):
            yield name, replace(form, source=text)
    yield from _around(form)


def _around(form: Form) -> Iterator[tuple[str, Form]]:
    helpers = re.findall(r"    def (_?\w+)\(self, \w", form.source)
    helper = next((one for one in helpers if one not in ("forward", "__init__")), "")
    functions = re.findall(r"^def (\w+)\((\w+)", form.source, re.MULTILINE)
    for name, text in STRUCTURE:
        for function, first in functions if "{name}" in text else [("", "")]:
            if "{helper}" in text and not helper:
                continue
            words = {"{cls}": form.kind, "{helper}": helper, "{name}": function, "{first}": first}
            made = text
            for word, put in words.items():
                made = made.replace(word, put)
            owner = "Other" if "class Other" in made else form.owner
            yield name, replace(form, source=form.source + made, owner=owner)


def _compiles(text: str) -> bool:
    try:
        compile(text, "perturbed", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
