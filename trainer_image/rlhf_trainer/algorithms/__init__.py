"""One file an algorithm; each reads like its paper and knows no runtime."""
