"""`python -m dflash_jax`, the same as `dflash-jax`."""

from dflash_jax.cli import main

if __name__ == "__main__":
    main()
