"""The five concepts, Batch, Head, Calibrator, Loss and Summary, and what they stand on."""
