"""Variables whose values are secret and others, as the launcher and the operator tell them apart, each by itself."""

VARIABLES = [
    ("TOKENIZER_PATH", "/mnt/shared/bpe", False),
    ("TOKENIZERS_PARALLELISM", "disabled", False),
    ("MAX_TOKENS", "1000000", False),
    ("NUM_TOKENS_PER_BATCH", "1048576", False),
    ("API_TOKENS", "sk-abcdef,sk-ghijkl", True),
    ("OTP_TOKEN", "123456", True),
    ("ACCOUNT_TOKEN", "123456", True),
    ("MAX_TOKEN_LENGTH", "131072", False),
    ("HF_TOKEN", "hf_abcdef", True),
    ("TOKEN", "1234567890123", True),
    ("db_password", "12345678", True),
    ("TOKENIZER_API_KEY", "abcdef", True),
]
"""Name, value, and whether the value is secret."""
