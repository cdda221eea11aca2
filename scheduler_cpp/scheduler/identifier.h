// Ids of requests and cache groups: names that are copied into every plan.
//
// Thread safety: a constant and a pure function.

#ifndef TOKENSPEED_SCHEDULER_IDENTIFIER_H_
#define TOKENSPEED_SCHEDULER_IDENTIFIER_H_

#include <cstddef>
#include <stdexcept>
#include <string>

namespace tokenspeed {

inline constexpr std::size_t kMaxIdBytes = 4096;

// Throws std::invalid_argument naming `field` for an id that is empty or too long.
inline void ValidateId(const std::string& field, const std::string& id) {
  if (id.empty()) throw std::invalid_argument(field + " must not be empty");
  if (id.size() > kMaxIdBytes) {
    throw std::invalid_argument(field + " must have at most " + std::to_string(kMaxIdBytes) + " bytes, got " +
                                std::to_string(id.size()));
  }
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_IDENTIFIER_H_
