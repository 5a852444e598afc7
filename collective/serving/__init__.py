"""SavedModels: tables of stock operations, copied from a checkpoint."""
