"""What is built of attention calls: modules, key-value caches, latent attention."""
