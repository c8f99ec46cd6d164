"""Installed as ``gtpgraph.passes``; never importable as a top-level ``passes``."""

if __name__ != "gtpgraph.passes":  # a second name would register every operator twice
    raise ImportError(
        f"{__name__!r} was imported by its bare name; expected 'gtpgraph.passes'. "
        "Import gtpgraph.passes instead (and keep the repository root off PYTHONPATH)."
    )
