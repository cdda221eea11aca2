// The compression function of SHA-256 in the processor's own instructions, where it has them (x86-64 with SHA-NI).
//
// Thread safety: pure functions.

#ifndef TOKENSPEED_PREFIX_SHA256_INSTRUCTIONS_H_
#define TOKENSPEED_PREFIX_SHA256_INSTRUCTIONS_H_

#include <cstdint>

namespace tokenspeed {

// Whether this processor, and this build, have them.
bool HasSha256Instructions();

// Folds one block of 64 bytes into the state. Only where HasSha256Instructions().
void CompressWithInstructions(uint32_t* state, const uint8_t* block);

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_SHA256_INSTRUCTIONS_H_
