"""The reference GPT's named sizes: plain numbers, for those who need no model."""

# Named sizes: (layers, d_model, heads, positions).
SIZES = {
    "gpt-tiny": (2, 128, 4, 512),
    "gpt-small": (4, 256, 4, 512),
    "gpt-medium-512": (6, 512, 8, 512),
    "gpt-medium-1024": (6, 512, 8, 1024),
    "gpt-medium-2048": (6, 512, 8, 2048),
    "gpt-large": (8, 768, 12, 512),
    "gpt2-small": (12, 768, 12, 1024),
    "gpt2-medium": (24, 1024, 16, 1024),
    "gpt2-large": (36, 1280, 20, 1024),
    "gpt2-xl": (48, 1600, 25, 1024),
}
PRESETS = tuple(SIZES)
