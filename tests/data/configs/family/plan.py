def plan() -> str:
    return "beside the config"
