// Sha256: the FIPS 180-4 hash, incremental, in the processor's own instructions where it has them.
//
// Invariants: Finish() may be called once; the object is then spent.
// Thread safety: none. Ownership: no memory but its own fields.

#ifndef TOKENSPEED_PREFIX_SHA256_H_
#define TOKENSPEED_PREFIX_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenspeed {

class Sha256 {
 public:
  static constexpr std::size_t kDigestBytes = 32;
  using Digest = std::array<uint8_t, kDigestBytes>;

  void Update(std::span<const uint8_t> bytes);
  Digest Finish();

  // The compression function in plain C++: what runs where the processor has no instructions for it, and the reference for
  // those.
  static void CompressPortably(uint32_t* state, const uint8_t* block);

 private:
  static constexpr std::size_t kBlockBytes = 64;
  void Compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlockBytes> pending_ = {};
  std::size_t pending_bytes_ = 0;
  uint64_t total_bytes_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_SHA256_H_
