"""Installed as ``gtpgraph.kernels``; never importable as a top-level ``kernels``."""

if __name__ != "gtpgraph.kernels":  # a second name would register every operator twice
    raise ImportError(
        f"{__name__!r} was imported by its bare name; expected 'gtpgraph.kernels'. "
        "Import gtpgraph.kernels instead (and keep the repository root off PYTHONPATH)."
    )
