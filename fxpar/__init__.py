"""fxpar: automatic tensor parallelism for PyTorch by torch.fx graph rewriting."""
