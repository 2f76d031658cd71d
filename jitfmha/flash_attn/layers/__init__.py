"""Where flash-attn keeps its layers; of these there is the rotary embedding."""
