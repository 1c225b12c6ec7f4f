"""What a research group brings along; its model and data are made by the acceptance script."""
