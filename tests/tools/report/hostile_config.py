"""A user's patch whose description and source are full of markup."""

from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.qwen3.modeling_qwen3")


@config.override_method(
    "Qwen3RMSNorm.extra_repr", description="</script><b onclick='x()'>bold</b> & \"more\" \u202e"
)
def extra_repr(self):
    return "</td></table><script>document.title = 'taken'</script><!-- &amp; -->"
