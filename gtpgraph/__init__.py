"""gtpgraph: readiness as part of the captured backward graph of GTP-sharded models."""
