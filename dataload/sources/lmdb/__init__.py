"""LMDB environments: plain LMDB and TorchRecord."""
