"""Options of vLLM and SGLang that are refused with a reason: they ask for something that is not there, or that
cannot be had otherwise."""

from types import MappingProxyType

_ONE_GPU = "an engine runs on one GPU"
_NO_COPY = "nothing is moved from the GPU's cache to host memory"
_NO_LORA = "LoRA adapters are not served"
_NO_SPECULATION = "speculative decoding is not served"
_TEMPLATE = "a conversation goes through the checkpoint's own template"
_TOKENIZER = "the tokenizer is the checkpoint's own"
_COMPILED = "steps are always compiled; --no-warmup compiles them on first use"
_KERNELS = "kernels are chosen by --attention-implementation"
_GRAMMARS = "the grammar backend is chosen by --grammar-backend"
_JSON_BLANKS = "blanks between the tokens of JSON are allowed and bounded; a schema's x-guidance changes that"
_ORDER = "requests run in the order of their `priority` field, and of arrival among equals"
_QUANTIZED = "weights are not kept quantised; those of gpt-oss and of GGUF files are expanded on loading"
_METRICS = "/metrics is always there"
_REQUEST_LOG = "prompts are never logged; --access-log prints a line per request"
_PROXY = "put a proxy in front of the server for it"

REFUSED = MappingProxyType(
    {
        "--tensor-parallel-size": _ONE_GPU,
        "-tp": _ONE_GPU,
        "--tp": _ONE_GPU,
        "--tp-size": _ONE_GPU,
        "--pipeline-parallel-size": _ONE_GPU,
        "-pp": _ONE_GPU,
        "--pp-size": _ONE_GPU,
        "--data-parallel-size": _ONE_GPU + "; start one server per GPU",
        "-dp": _ONE_GPU + "; start one server per GPU",
        "--dp": _ONE_GPU + "; start one server per GPU",
        "--dp-size": _ONE_GPU + "; start one server per GPU",
        "--enable-expert-parallel": _ONE_GPU,
        "--ep-size": _ONE_GPU,
        "--nnodes": _ONE_GPU,
        "--dist-init-addr": _ONE_GPU,
        "--distributed-executor-backend": _ONE_GPU,
        "--schedule-policy": _ORDER,
        "--scheduling-policy": _ORDER,
        "--schedule-conservativeness": "nothing is reserved ahead; requests are retracted when the cache is full",
        "--enable-chunked-prefill": "prefill is always chunked, by --max-num-batched-tokens",
        "--no-enable-chunked-prefill": "prefill is always chunked, by --max-num-batched-tokens",
        "--enable-mixed-chunk": "prefill and decode always share steps",
        "--max-prefill-tokens": "the bound of a step is --max-num-batched-tokens, and a longer prompt does not raise "
        "it as it does in SGLang",
        "--max-total-tokens": "the cache is sized in bytes, by --kv-cache-memory-bytes",
        "--num-gpu-blocks-override": "the cache is sized in bytes, by --kv-cache-memory-bytes",
        "--swap-space": _NO_COPY,
        "--cpu-offload-gb": _NO_COPY,
        "--enable-hierarchical-cache": _NO_COPY,
        "--quantization": _QUANTIZED,
        "-q": _QUANTIZED,
        "--load-format": "the checkpoint's files say what they are",
        "--kv-cache-dtype": "keys and values are cached in the compute dtype, --dtype",
        "--attention-backend": _KERNELS,
        "--sampling-backend": _KERNELS,
        "--moe-runner-backend": _KERNELS,
        "--structured-outputs-config": _GRAMMARS,
        "--guided-decoding-disable-fallback": _GRAMMARS,
        "--guided-decoding-disable-any-whitespace": _JSON_BLANKS,
        "--constrained-json-whitespace-pattern": _JSON_BLANKS,
        "--constrained-json-disable-any-whitespace": _JSON_BLANKS,
        "--enforce-eager": _COMPILED,
        "--disable-cuda-graph": _COMPILED,
        "--cuda-graph-max-bs": _COMPILED,
        "--cuda-graph-bs": _COMPILED,
        "--compilation-config": _COMPILED,
        "--enable-torch-compile": _COMPILED,
        "--skip-server-warmup": _COMPILED,
        "--trust-remote-code": "code from a checkpoint is never run",
        "--no-trust-remote-code": "code from a checkpoint is never run",
        "--tokenizer": _TOKENIZER,
        "--tokenizer-path": _TOKENIZER,
        "--tokenizer-mode": _TOKENIZER,
        "--skip-tokenizer-init": _TOKENIZER + "; requests may bring token ids all the same",
        "--chat-template": _TEMPLATE,
        "--chat-template-content-format": _TEMPLATE,
        "--hf-overrides": "config.json is taken as it is",
        "--json-model-override-args": "config.json is taken as it is",
        "--generation-config": "sampling defaults are OpenAI's, whatever the checkpoint recommends",
        "--device": "the first GPU is used, or the CPU where there is none",
        "--enable-lora": _NO_LORA,
        "--lora-modules": _NO_LORA,
        "--lora-paths": _NO_LORA,
        "--speculative-config": _NO_SPECULATION,
        "--speculative-algorithm": _NO_SPECULATION,
        "--limit-mm-per-prompt": "images and audio are not served",
        "--disaggregation-mode": "prefill and decode are not split between servers",
        "--kv-transfer-config": "the cache is not moved between machines",
        "--enable-metrics": _METRICS,
        "--enable-trace": "--otlp-traces-endpoint turns traces on",
        "--collect-detailed-traces": "a trace of --otlp-traces-endpoint has everything that is known of its request",
        "--disable-log-stats": _METRICS,
        "--enable-cache-report": "usage always has the cached tokens",
        "--enable-prompt-tokens-details": "usage always has the cached tokens",
        "--disable-log-requests": _REQUEST_LOG,
        "--enable-log-requests": _REQUEST_LOG,
        "--log-requests": _REQUEST_LOG,
        "--uvicorn-log-level": "--log-level is the level of all messages",
        "--disable-uvicorn-access-log": "lines per request are off unless --access-log",
        "--ssl-keyfile": "there is no TLS; " + _PROXY,
        "--ssl-certfile": "there is no TLS; " + _PROXY,
        "--root-path": _PROXY,
        "--allowed-origins": "no cross-origin headers are sent; " + _PROXY,
    }
)
"""Option as it is written -> why it is refused, and what to use in its place."""
