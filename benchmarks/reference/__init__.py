"""DFlash, DFlash 2 and LiLiCorr drafters in plain PyTorch: to read, to train, to compare with."""
