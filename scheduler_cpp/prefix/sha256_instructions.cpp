#include "prefix/sha256_instructions.h"

#include "core/check.h"
#include "prefix/sha256_constants.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tokenspeed {

#if defined(__x86_64__)

bool HasSha256Instructions() {
  static const bool has = [] {
    constexpr unsigned kSse41 = 1U << 19;
    constexpr unsigned kShaExtensions = 1U << 29;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSse41) == 0) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kShaExtensions) != 0;
  }();
  return has;
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), and take four rounds' words at a time.
__attribute__((target("sha,sse4.1"))) void CompressWithInstructions(uint32_t* state, const uint8_t* block) {
  const __m128i swap_bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  const __m128i abef_before = _mm_alignr_epi8(low, high, 8);
  const __m128i cdgh_before = _mm_blend_epi16(high, low, 0xf0);

  __m128i abef = abef_before;
  __m128i cdgh = cdgh_before;
  __m128i words[4];
  for (int quad = 0; quad < 16; ++quad) {
    __m128i& next = words[quad % 4];
    if (quad < 4) {
      next = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * quad)), swap_bytes);
    } else {
      const __m128i last = words[(quad + 3) % 4];
      const __m128i seven_back = _mm_alignr_epi8(last, words[(quad + 2) % 4], 4);
      const __m128i sigma = _mm_sha256msg1_epu32(next, words[(quad + 1) % 4]);
      next = _mm_sha256msg2_epu32(_mm_add_epi32(sigma, seven_back), last);
    }
    const auto* constants = reinterpret_cast<const __m128i*>(kSha256RoundConstants.data() + 4 * quad);
    const __m128i summed = _mm_add_epi32(next, _mm_loadu_si128(constants));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, summed);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(summed, 0x0e));
  }

  abef = _mm_shuffle_epi32(_mm_add_epi32(abef, abef_before), 0x1b);
  cdgh = _mm_shuffle_epi32(_mm_add_epi32(cdgh, cdgh_before), 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(abef, cdgh, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(cdgh, abef, 8));
}

#else

bool HasSha256Instructions() { return false; }

void CompressWithInstructions(uint32_t*, const uint8_t*) {
  TOKENSPEED_CHECK(false, "this build knows no SHA-256 instructions");
}

#endif

}  // namespace tokenspeed
