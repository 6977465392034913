"""Our batch script templates; a package so that they are found when installed."""
