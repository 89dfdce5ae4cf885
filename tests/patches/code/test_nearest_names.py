from veomni_hook.patches.code.nearest_names import is_near_miss, nearest


def test_near_misses():
    assert is_near_miss("forwrad", "forward")
    assert not is_near_miss("forward", "forward")
    assert not is_near_miss("dummy_forward", "forward")


def test_nearest_ranks_and_leaves_strangers_out():
    names = ["Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention", "Qwen3RMSNorm.forward"]
    assert nearest("Qwen3RMSNrom", names)[0] == "Qwen3RMSNorm"
    assert nearest("Qwen3RMSnorm.forwrad", names)[0] == "Qwen3RMSNorm.forward"
    assert nearest("zzz", names) == ()
